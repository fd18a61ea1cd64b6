"""Real SGLang servers share KV straight from their device pools, without host memory: ``make test-sglang``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_prompts import N_PAGES, NOTICED_S, PAGE, cached, meet, prompt, serve_anew
from sglang_server import SGLangServer, hicache_server, linker_server

from cluster import eventually
from demo.xpyd.real_engines import SGLang, lasting_port

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

ALL = N_PAGES * PAGE


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[SGLangServer, SGLangServer, SGLangServer]]:
    """Two servers with a linker, and one with HiCache in the layout that has the same bytes."""
    join = f"127.0.0.1:{lasting_port()}"

    def settings(name: str) -> dict[str, object]:
        return {"node_id": name, "join": [join], "pool_size": "64MiB"}

    started = (
        linker_server(tmp_path / "first.log", settings("first")),
        linker_server(tmp_path / "second.log", settings("second")),
        hicache_server(tmp_path / "host.log", layout="page_first_direct", settings=settings("host")),
    )
    yield started
    for server in started:
        server.kill()


def test_kv_goes_from_device_to_device_and_a_death_costs_misses(
    servers: tuple[SGLangServer, SGLangServer, SGLangServer], other_weights: Path
) -> None:
    first, second, host = servers
    for server in servers:
        server.wait_until_ready()
    meet(*servers)

    # what one has computed, the others have from outside, whether they keep host memory or not
    for seed in (1, 2, 3):
        outputs = serve_anew(first, prompt(seed))
        fetched, published = second.fetched_pages(), second.published_pages()
        answer = second.generate(prompt(seed))
        assert cached(answer)["all"] == ALL
        assert answer["output_ids"] == outputs
        assert second.fetched_pages() == fetched + N_PAGES
        assert second.published_pages() <= published + 1, "what others have is not stored again"
        answer = host.generate(prompt(seed))
        assert cached(answer)["storage"] == ALL
        assert answer["output_ids"] == outputs
    outputs = serve_anew(host, prompt(4))
    answer = second.generate(prompt(4))
    assert cached(answer)["all"] == ALL
    assert answer["output_ids"] == outputs

    # what its device has forgotten a server has from its own pool
    first.flush()
    answer = first.generate(prompt(1))
    assert cached(answer)["all"] == ALL

    # KV of other weights is nobody's hit
    before = serve_anew(first, prompt(7))
    second.update_weights(other_weights, "v2")
    answer = second.generate(prompt(7))
    assert cached(answer)["all"] == 0
    assert answer["output_ids"] != before
    second.update_weights(SGLang.VENV / "tiny-model", "default")
    answer = second.generate(prompt(7))
    assert cached(answer)["all"] == ALL
    assert answer["output_ids"] == before

    # pages that died with their owner are computed, by requests that come before anybody knows and after
    lost = [serve_anew(first, prompt(seed)) for seed in (5, 6)]
    first.kill()
    assert second.generate(prompt(5))["output_ids"] == lost[0]
    eventually(lambda: second.counters()["p2pkv_members"] == 2, NOTICED_S)
    answer = second.generate(prompt(6))
    assert cached(answer)["all"] == 0
    assert answer["output_ids"] == lost[1]
    for server in (second, host):
        assert not [name for name in server.counters() if name.startswith("p2pkv_failed_calls_total")]
