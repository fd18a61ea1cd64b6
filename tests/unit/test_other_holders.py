"""What look-ups say of a page that several nodes hold: not only the one that is read first."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np

import pages
from cluster import Cluster, eventually
from p2pkv import Config, Node, _native
from p2pkv.cache.page_cache import PageCache
from p2pkv.testing.ports import free_port

NBYTES = 4096
N_PAGES = 32
SETTLE_S = 10.0


def test_the_first_look_up_names_every_holder_whoever_is_asked() -> None:
    """Two thirds of the keys are other nodes' to answer for, over the wire: and there is no channel to them yet."""
    join = [f"127.0.0.1:{free_port()}"]
    with (
        Node.start(Config(node_id="a", join=join, replicas=1)) as a,
        Node.start(Config(node_id="b", join=join, replicas=1)) as b,
        Node.start(Config(node_id="reader", join=join, replicas=1)) as reader,
    ):
        eventually(lambda: len(reader.members()) == 3, SETTLE_S)
        rows = np.ones((N_PAGES, NBYTES), np.uint8)
        keys = [f"page-{i}" for i in range(N_PAGES)]
        for holder in (a, b):
            holder.register_memory(rows)
            eventually(lambda holder=holder: len(holder.members()) == 3, SETTLE_S)
            assert all(holder.publish(keys, rows))
        cache, caching = reader._cache, reader._parts.caching
        assert isinstance(cache, PageCache)
        _, raw = cache.hash(keys)

        assert reader.exists(keys).all()
        assert all(caching._other_holders.of(raw[i : i + 1]).size for i in range(N_PAGES))


def test_what_is_looked_up_once_more_is_asked_of_those_who_answer_for_it() -> None:
    """The reader's own shard was told of one holder by a node that took who answers for the page for dead."""
    with (
        Cluster(replicas=1, transports=["tcp"]) as cluster,
        Node.start(Config(node_id="living", join=[cluster.join], replicas=1, transports=("tcp",))) as living,
        Node.start(
            Config(
                node_id="reader",
                join=[cluster.join],
                replicas=1,
                transports=("tcp",),
                deadline=2.0,
                buffer_size=0,
            )
        ) as reader,
    ):
        stopped = cluster.start("stopped")
        eventually(lambda: len(reader.members()) == len(living.members()) == 3, SETTLE_S)
        cache, caching = reader._cache, reader._parts.caching
        assert isinstance(cache, PageCache)
        ring = caching.directory.ring

        def of_living(name: str) -> list[str]:
            """Return keys for which that node alone answers."""
            keys = [f"{name}-{i}" for i in range(4 * N_PAGES)]
            owners = ring.owners(cache.hash(keys)[1])[:, 0]
            return [
                key
                for key, owner in zip(keys, owners, strict=True)
                if ring.members[owner].node_id == "living"
            ]

        def publish(keys: list[str]) -> None:
            pages.fill(rows[: len(keys)], keys)
            assert living.publish(keys, rows[: len(keys)]).all()

        rows = np.zeros((4 * N_PAGES, NBYTES), np.uint8)
        living.register_memory(rows)
        probe, keys = of_living("probe")[:1], of_living("page")[:4]
        assert all(stopped.call("publish", keys=[*probe, *keys], nbytes=NBYTES))
        publish(probe)
        _, raw = cache.hash(probe)

        caching.directory.get(raw, time.monotonic() + 1.0)
        assert caching._other_holders.of(raw).size > 0
        _, raw = cache.hash(keys)
        found, locations = caching.directory.get(raw, time.monotonic() + 1.0)
        assert found.all()
        publish(keys)
        reader._parts.control.shard.put(_native.put_entries(raw, locations, 1))
        memory = np.zeros((len(keys), NBYTES), np.uint8)
        reader.register_memory(memory)
        assert reader.fetch(keys, memory).all()
        stopped.stop()
        try:
            hits = reader.fetch(keys, memory)
        finally:
            stopped.resume()
        assert hits.all()
        assert pages.wrong(memory, keys, hits) == []


def test_readers_are_spread_over_all_who_have_a_page() -> None:
    join = [f"127.0.0.1:{free_port()}"]
    with ExitStack() as closing:
        holders = [closing.enter_context(Node.start(Config(node_id=name, join=join))) for name in "abc"]
        reader = closing.enter_context(Node.start(Config(node_id="reader", join=join)))
        rows = np.ones((N_PAGES, NBYTES), np.uint8)
        keys = [f"page-{i}" for i in range(N_PAGES)]
        for holder in holders:
            holder.register_memory(rows)
            eventually(lambda holder=holder: len(holder.members()) == 4, SETTLE_S)
            assert all(holder.publish(keys, rows))
        cache, caching = reader._cache, reader._parts.caching
        assert isinstance(cache, PageCache)
        _, raw = cache.hash(keys)

        def is_each_named_thrice() -> bool:
            """Look up anew: who answers for a page may not have heard of all of them yet."""
            cache.locations.drop(raw)
            assert reader.exists(keys).all()
            return all(caching._other_holders.of(raw[i : i + 1]).size > 64 for i in range(N_PAGES))

        eventually(is_each_named_thrice, SETTLE_S)
        memory = np.zeros_like(rows)
        reader.register_memory(memory)

        def fetch() -> dict[str, int]:
            assert reader.fetch(keys, memory).all()
            return {peer.node_id: peer.n_pages for peer in reader.peers()}

        # No call connects to more than one of them: that is done between calls.
        eventually(lambda: all(fetch().get(holder.node_id) for holder in holders), SETTLE_S)
        before = fetch()
        for _ in range(240):
            after = fetch()
        read = {node_id: n_pages - before[node_id] for node_id, n_pages in after.items()}
        even = 240 * N_PAGES / len(holders)
        # One whose reads take six times as long as the others' has less: a busy machine may make one look so.
        assert all(even / 3 < read.get(holder.node_id, 0) < 2 * even for holder in holders), read


def test_holders_that_a_look_up_does_not_name_any_more_are_forgotten() -> None:
    """Else they would be drawn, and each page be read from them in vain once."""
    join = [f"127.0.0.1:{free_port()}"]
    with (
        Node.start(Config(node_id="a", join=join, replicas=1)) as a,
        Node.start(Config(node_id="b", join=join, replicas=1)) as b,
        Node.start(Config(node_id="reader", join=join, replicas=1)) as reader,
    ):
        rows = np.ones((N_PAGES, NBYTES), np.uint8)
        keys = [f"page-{i}" for i in range(N_PAGES)]
        for holder in (a, b):
            holder.register_memory(rows)
            eventually(lambda holder=holder: len(holder.members()) == 3, SETTLE_S)
            assert all(holder.publish(keys, rows))
        eventually(lambda: len(reader.members()) == 3, SETTLE_S)
        cache, caching = reader._cache, reader._parts.caching
        assert isinstance(cache, PageCache)
        _, raw = cache.hash(keys)

        def n_with_others() -> int:
            cache.locations.drop(raw)
            assert reader.exists(keys).all()
            return sum(caching._other_holders.of(raw[i : i + 1]).size > 0 for i in range(N_PAGES))

        eventually(lambda: n_with_others() == N_PAGES, SETTLE_S)
        b.retract(keys)
        eventually(lambda: n_with_others() == 0, SETTLE_S)
