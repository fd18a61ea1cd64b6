"""KV that a real SGLang server computes is packed without loss: another server goes on from it as from its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_prompts import N_PAGES, PAGE, cached, meet, prompt, serve_anew
from sglang_server import SGLangServer, hicache_server, lasting_port

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[SGLangServer]]:
    """Two that meet, and pack whatever they publish."""
    settings = {"join": [f"127.0.0.1:{lasting_port()}"], "pool_size": "64MiB", "compression": "lossless"}
    options = ["--dtype", "bfloat16"]  # the other tests' float32 gets no smaller
    servers = [
        hicache_server(
            tmp_path / f"{name}.log",
            layout="page_first_direct",
            settings=settings | {"node_id": name},
            options=options,
        )
        for name in ("first", "second")
    ]
    yield servers
    for server in servers:
        server.kill()


def test_a_server_goes_on_from_packed_kv(
    servers: list[SGLangServer], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = servers
    for server in servers:
        server.wait_until_ready()
    meet(first, second)
    for seed in (1, 2, 3):
        output = serve_anew(first, prompt(seed))
        answer = second.generate(prompt(seed))
        assert cached(answer)["storage"] == N_PAGES * PAGE
        assert answer["output_ids"] == output
    counters = first.counters()
    tried, stored = (counters[f"p2pkv_packing{what}_bytes_total"] for what in ("", "_stored"))
    assert tried > stored, "nothing got smaller"
    with capsys.disabled():
        print(f"\npages of {tried / (3 * N_PAGES):,.0f} bytes took 1/{tried / stored:.2f} of the pool")
