"""Pages that owners keep for readers are kept within bounds: of time, of bytes, and of the reader's own life."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster import eventually
from p2pkv import Config, Node
from p2pkv.directory.client import Lease
from p2pkv.testing.ports import free_port

N, NBYTES, POOL = 160, 4096, 1 << 20


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes, of which the first has published pages and a disk tier, and the second a channel to the first."""
    join = [f"127.0.0.1:{free_port()}"]
    below = {"disk_path": str(tmp_path / "disk"), "disk_size": "16MiB"}
    with (
        Node.start(Config(node_id="owner", join=join, pool_size=POOL, buffer_size=0, **below)) as owner,  # type: ignore[arg-type]
        Node.start(Config(node_id="reader", join=join, pool_size=POOL, buffer_size=0)) as reader,
    ):
        source = np.ones((N, NBYTES), np.uint8)
        owner.register_memory(source)
        eventually(lambda: len(reader.members()) == 2, 20.0)
        assert owner.publish(keys(), source, timeout=10.0).all()
        [member] = [member for member in reader.members() if member.node_id == "owner"]

        def has_channel() -> bool:
            reader.exists(keys(), timeout=5.0)
            (channel,) = reader._parts.caching.channels.borrow([member])
            if channel is not None:
                reader._parts.caching.channels.give_back([member], [channel], [True])
            return channel is not None

        eventually(has_channel, 30.0)
        yield owner, reader


def keys() -> list[str]:
    return [f"page-{i}" for i in range(N)]


def ask_for_a_day(reader: Node) -> int:
    """Have all pages kept for much longer than any call takes; return how many were found."""
    cache = reader._cache
    _, ids = cache.hash(keys())
    _, raw = cache._directory.get(ids, time.monotonic() + 10)
    lease = Lease(86_400.0, 12345)
    found, _ = cache._directory.promote(ids, raw, time.monotonic() + 10, answer_s=5.0, lease=lease)
    return int(found.sum())


def pinned(owner: Node) -> float:
    return owner.counters()["p2pkv_pool_pinned_bytes"]


def test_one_reader_pins_no_more_than_a_quarter_of_the_pool(nodes: tuple[Node, Node]) -> None:
    owner, reader = nodes
    eventually(lambda: pinned(owner) == 0, 20.0)  # what was being written to the disk
    assert ask_for_a_day(reader) == N
    assert ask_for_a_day(reader) == N
    assert pinned(owner) > 0
    # what the reader had pinned stays so for a day; what is being written to the disk is pinned as well, for a moment
    eventually(lambda: pinned(owner) <= POOL // 4, 20.0)


def test_what_a_reader_had_pinned_is_free_when_it_is_gone(nodes: tuple[Node, Node]) -> None:
    owner, reader = nodes
    eventually(lambda: pinned(owner) == 0, 20.0)
    ask_for_a_day(reader)
    assert pinned(owner) > 0
    reader.close()
    eventually(lambda: pinned(owner) == 0, 20.0)
