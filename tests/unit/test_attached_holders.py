"""Attached engines read pages that several nodes have as a node in process does: from all, and not from who is late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import pages
from cluster import Cluster, NodeProcess, eventually
from p2pkv import Config, Node
from p2pkv.attach.cache import AttachedCache

NBYTES = 4096
KEYS = [f"page-{i}" for i in range(32)]
SETTLE_S = 10.0


class Engine:
    """An engine that is attached to a node without pages, beside other nodes of its cluster."""

    def __init__(self, cluster: Cluster, path: str, undo: ExitStack) -> None:
        settings = {"join": [cluster.join], "transports": ("tcp",), "deadline": 5.0}
        undo.enter_context(
            Node.start(Config(node_id="host", attach_listen=path, pool_size="1MiB", **settings))
        )  # type: ignore[arg-type]
        self.node = undo.enter_context(Node.start(Config(attach=path, transports=("tcp",), deadline=5.0)))
        self.memory = np.zeros((len(KEYS), NBYTES), np.uint8)
        self.node.register_memory(self.memory)

    def fetch(self) -> dict[str, int]:
        """Have all pages come; return how many came from whom, in all."""
        hits = self.node.fetch(KEYS, self.memory)
        assert pages.wrong(self.memory, KEYS, hits) == []
        assert hits.all()
        return {peer.node_id: peer.n_pages for peer in self.node.peers()}

    def wait_named(self, n_bytes: int) -> None:
        """Until look-ups name so many bytes of other holders of each page: shards may not have heard of all yet."""
        cache, others = self.node._cache, self.node._parts._other_holders
        assert isinstance(cache, AttachedCache)
        _, raw = cache.hash(KEYS)

        def are_named() -> bool:
            cache._reader.locations.drop(raw)
            assert self.node.exists(KEYS).all()
            return all(others.of(raw[i : i + 1]).size >= n_bytes for i in range(len(KEYS)))

        eventually(are_named, SETTLE_S)


@pytest.fixture
def holders(tmp_path: Path) -> Iterator[tuple[Engine, list[NodeProcess]]]:
    (tmp_path / "host").mkdir(mode=0o700)
    with Cluster(transports=["tcp"]) as cluster, ExitStack() as undo:
        nodes = [cluster.start(name) for name in "abc"]
        engine = Engine(cluster, f"unix:{tmp_path}/host/s", undo)
        eventually(lambda: len(engine.node.members()) == 4, SETTLE_S)
        for node in nodes:
            eventually(lambda node=node: len(node.call("members")) == 4, SETTLE_S)
            assert all(node.call("publish", keys=KEYS, nbytes=NBYTES, timeout=20.0))
        engine.wait_named(128)
        # no call connects to more than one of them: that is done between calls
        eventually(lambda: all(engine.fetch().get(node.node_id) for node in nodes), SETTLE_S)
        yield engine, nodes


def test_reads_of_an_attached_engine_are_spread(holders: tuple[Engine, list[NodeProcess]]) -> None:
    engine, nodes = holders
    before = engine.fetch()
    n_fetches = 0
    read: dict[str, int] = {}

    def are_all_read() -> bool:
        nonlocal n_fetches, read
        for _ in range(240):
            after = engine.fetch()
        n_fetches += 240
        read = {node.node_id: after[node.node_id] - before[node.node_id] for node in nodes}
        return min(read.values()) > 0

    # A holder that waits for a processor is passed over for a moment, which may be that of so many fetches.
    eventually(are_all_read, SETTLE_S)
    assert sum(read.values()) == n_fetches * len(KEYS)


def test_an_attached_engine_leaves_a_holder_that_has_stopped(
    holders: tuple[Engine, list[NodeProcess]],
) -> None:
    engine, nodes = holders
    for _ in range(60):
        engine.fetch()  # so that it is known how long reads take

    def n_left() -> float:
        counted = engine.node.counters()
        return sum(n for name, n in counted.items() if name.startswith("p2pkv_hedged_reads_total"))

    before = n_left()
    nodes[0].stop()

    def is_left() -> bool:
        for _ in range(30):
            engine.fetch()
        return n_left() > before

    try:
        eventually(is_left, SETTLE_S)  # fetches draw whom they ask, and any number may draw the others
    finally:
        nodes[0].resume()
