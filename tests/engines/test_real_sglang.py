"""Two real SGLang servers share their KV through p2pkv: ``make test-sglang``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sglang_prompts import N_PAGES, NOTICED_S, PAGE, cached, meet, prompt, serve_anew
from sglang_server import SGLangServer, hicache_server, lasting_port

from cluster import eventually
from demo.xpyd.real_engines import SGLang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

Start = Callable[[str], SGLangServer]


@pytest.fixture(params=["page_first_direct", "layer_first"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Start servers by name that meet at one join address; all are gone when the test ends."""
    join = f"127.0.0.1:{lasting_port()}"
    servers: list[SGLangServer] = []

    def start(name: str) -> SGLangServer:
        settings = {"node_id": name, "join": [join], "pool_size": "64MiB"}
        log = tmp_path / f"{name}-{len(servers)}.log"
        servers.append(hicache_server(log, layout=request.param, settings=settings))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def no_other_weights_kv_is_found(first: SGLangServer, second: SGLangServer, other: Path) -> None:
    """Replace the weights of one server, then of both: they share where both are known to have the same."""
    before = serve_anew(first, prompt(7))
    second.update_weights(other, "v2")
    answer = second.generate(prompt(7))
    assert cached(answer)["all"] == 0, "the other server's KV is of other weights"
    after = answer["output_ids"]
    assert after != before

    first.update_weights(other, "v2")
    output = serve_anew(first, prompt(8))
    answer = second.generate(prompt(8))
    assert cached(answer)["storage"] == N_PAGES * PAGE
    assert answer["output_ids"] == output
    second.update_weights(SGLang.VENV / "tiny-model")
    answer = second.generate(prompt(7))
    assert cached(answer)["all"] == 0, "nobody has said which weights these are"
    assert answer["output_ids"] == before


def test_kv_computed_by_one_server_serves_another_through_death_and_return(
    start: Start, other_weights: Path
) -> None:
    first, second = start("first"), start("second")
    first.wait_until_ready()
    second.wait_until_ready()
    meet(first, second)

    # what the first has computed, the second has from outside, and goes on exactly as if it had computed it
    outputs = []
    for seed in (1, 2, 3):
        outputs.append(serve_anew(first, prompt(seed)))
        fetched = second.fetched_pages()
        answer = second.generate(prompt(seed))
        assert cached(answer)["storage"] == N_PAGES * PAGE
        assert answer["output_ids"] == outputs[-1]
        assert second.fetched_pages() == fetched + N_PAGES
    assert outputs[0] != outputs[1] != outputs[2], "outputs that are all the same would hide wrong KV"

    # the first dies while its pages are in the directory; the second notices and goes on without them
    lost = [serve_anew(first, prompt(seed)) for seed in (4, 5)]
    first.kill()
    assert second.generate(prompt(4))["output_ids"] == lost[0]
    eventually(lambda: second.counters()["p2pkv_members"] == 1, NOTICED_S)
    answer = second.generate(prompt(5))
    assert cached(answer)["storage"] == 0
    assert answer["output_ids"] == lost[1]
    output = serve_anew(second, prompt(6))

    # the first comes back under its old name, finds the cluster through the same address, and all its pages
    first = start("first")
    first.wait_until_ready()
    meet(first, second)
    pages = second.counters()[
        "p2pkv_pool_pages"
    ]  # the first's part of the directory is empty until told of them
    eventually(lambda: first.counters()["p2pkv_shard_entries"] >= pages, NOTICED_S)
    answer = first.generate(prompt(6))
    assert cached(answer)["storage"] == N_PAGES * PAGE
    assert answer["output_ids"] == output
    no_other_weights_kv_is_found(first, second, other_weights)
    for server in (first, second):
        assert not [name for name in server.counters() if name.startswith("p2pkv_failed_calls_total")]
