"""A real SGLang server takes p2pkv for its storage and gives it up while it runs: ``make test-sglang``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_prompts import N_PAGES, PAGE, cached, meet, prompt, serve_anew
from sglang_server import ADMIN_KEY, SGLangServer, hicache_server, unattached_server

from cluster import eventually
from demo.xpyd.real_engines import lasting_port

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

WITHIN_S = 10.0
"""What SGLang gives its storage threads."""
POOL = 64 << 20
CYCLES = 4
LAYOUT = "page_first_direct"
DEVICE_TOKENS = 4096
"""Of the recipe's servers."""


@pytest.fixture
def join() -> str:
    """Return where the servers of a test meet."""
    return f"127.0.0.1:{lasting_port()}"


@pytest.fixture
def other(tmp_path: Path, join: str) -> Iterator[SGLangServer]:
    """A server that has p2pkv from its start on; the test starts its own beside it."""
    settings = {"node_id": "other", "join": [join], "pool_size": POOL}
    server = hicache_server(tmp_path / "other.log", layout=LAYOUT, settings=settings)
    yield server
    server.kill()


@pytest.fixture
def attached(tmp_path: Path) -> Iterator[SGLangServer]:
    """A server with SGLang's own caches and no storage so far."""
    server = unattached_server(tmp_path / "attached.log", layout=LAYOUT)
    yield server
    server.kill()


def test_storage_is_attached_and_detached_within_ten_seconds_and_leaves_nothing(
    other: SGLangServer, attached: SGLangServer, join: str, tmp_path: Path
) -> None:
    other.wait_until_ready()
    attached.wait_until_ready()
    settings = {
        "node_id": "attached",
        "join": [join],
        "pool_size": POOL,
        "disk_path": str(tmp_path / "disk"),
        "disk_size": POOL,
    }
    outputs = serve_anew(other, prompt(1))
    own: list[int] = []
    levels = []
    for cycle in range(CYCLES):
        attached.flush()
        began = time.monotonic()
        attached.attach(settings)
        assert time.monotonic() - began < WITHIN_S
        meet(other, attached)

        # what others have was there all along
        answer = attached.generate(prompt(1))
        assert cached(answer)["storage"] == N_PAGES * PAGE
        assert answer["output_ids"] == outputs

        # what this one published before it let go of its storage is there again, by its disk
        if cycle == 0:
            own = serve_anew(attached, prompt(2))
            eventually(lambda: attached.counters()["p2pkv_disk_pages"] >= N_PAGES, WITHIN_S)
        else:
            answer = attached.generate(prompt(2))
            assert cached(answer)["storage"] == N_PAGES * PAGE
            assert answer["output_ids"] == own

        began = time.monotonic()
        attached.detach()
        assert time.monotonic() - began < WITHIN_S
        eventually(lambda: other.counters()["p2pkv_members"] == 1, WITHIN_S)
        levels.append(attached.holds())
        assert levels[-1].node_threads == 0
        assert cached(attached.generate(prompt(3 + cycle)))["all"] == 0, "it serves on, by itself"

    first, last = levels[0], levels[-1]  # what is made once and kept is there after the first
    assert last.descriptors <= first.descriptors
    assert last.threads <= first.threads
    assert last.resident < first.resident + POOL // 2, "a pool stayed mapped"


def test_an_attach_that_is_refused_says_why_and_leaves_nothing(attached: SGLangServer) -> None:
    attached.wait_until_ready()
    before = attached.holds()
    status, text = attached.admin("PUT", attached.attachment({"pool_sise": "64MiB"}))
    assert status == 400
    assert "pool_size" in text
    after = attached.holds()
    assert after.node_threads == 0
    assert after.descriptors <= before.descriptors
    status, _ = attached.admin("PUT", attached.attachment({}), key=f"not {ADMIN_KEY}")
    assert status == 401
    assert cached(attached.generate(prompt(1)))["all"] == 0, "it serves on, by itself"
    attached.attach({"pool_size": POOL})
    attached.flush()
    outputs = serve_anew(attached, prompt(2))
    attached.flush()
    answer = attached.generate(prompt(2))
    assert cached(answer)["storage"] == N_PAGES * PAGE
    assert answer["output_ids"] == outputs


def test_pages_lie_in_memory_once_where_host_memory_is_a_buffer_only(tmp_path: Path, join: str) -> None:
    servers = [
        hicache_server(
            tmp_path / f"{name}.log",
            layout=LAYOUT,
            settings={"node_id": name, "join": [join], "pool_size": POOL},
            options=["--hicache-host-memory-mode", "buffer_only"],
        )
        for name in ("first", "second")
    ]
    try:
        first, second = servers
        for server in servers:
            server.wait_until_ready()
        meet(first, second)
        for seed in (1, 2, 3):
            outputs = serve_anew(first, prompt(seed))
            answer = second.generate(prompt(seed))
            assert cached(answer)["storage"] == N_PAGES * PAGE
            assert answer["output_ids"] == outputs
        # what the device had to give up for others comes from p2pkv again: SGLang kept it nowhere else
        for seed in range(4, 4 + DEVICE_TOKENS // (N_PAGES * PAGE) + 1):
            serve_anew(first, prompt(seed))
        answer = first.generate(prompt(1))
        assert cached(answer) == {"all": N_PAGES * PAGE, "host": 0, "storage": N_PAGES * PAGE}
    finally:
        for server in servers:
            server.kill()
