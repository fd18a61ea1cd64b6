"""Pages of one owner that several nodes read all the time come to these nodes, as processes of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster import Cluster, NodeProcess, eventually

NBYTES = 64 * 1024
POOL = 16 << 20
SHARE = 0.125
HOT = [f"hot {i}" for i in range(16)]
MANY = [f"many {i}" for i in range(64)]
"""Twice what the share has room for."""
SETTLE_S = 60.0
OWN_POOL, OVER_TCP = (f'p2pkv_fetched_pages_total{{source="{source}"}}' for source in ("own_pool", "tcp"))


class Crowd:
    """One owner, and three nodes that read from it."""

    def __init__(self, cluster: Cluster, **settings: object) -> None:
        self.owner = cluster.start("owner")
        self.readers = [cluster.start(f"reader {i}", **settings) for i in range(3)]
        cluster.meet(self.owner, *self.readers)

    def publish(self, keys: list[str]) -> None:
        for first in range(0, len(keys), 16):
            assert all(self.owner.call("publish", keys=keys[first : first + 16], nbytes=NBYTES, timeout=10.0))

    def read(self, keys: list[str]) -> list[int]:
        """Have each reader fetch; return how many pages each of them found, all of them right."""
        n_found = []
        for reader in self.readers:
            answer = reader.call("fetch", keys=keys, nbytes=NBYTES, timeout=5.0)
            assert answer["wrong"] == []
            n_found.append(sum(answer["hits"]))
        return n_found

    def counted(self, name: str) -> list[float]:
        return [reader.call("counters").get(name, 0.0) for reader in self.readers]

    def read_until_here(self, keys: list[str]) -> None:
        def are_here() -> bool:
            self.read(keys)
            return self.counted("p2pkv_hot_guest_pages") == [len(keys)] * 3

        eventually(are_here, SETTLE_S)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(pool_size=POOL, buffer_size=0, transports=["tcp"], deadline=5.0) as cluster:
        yield cluster


def test_readers_have_hot_pages_and_keep_them_when_the_owner_is_killed(cluster: Cluster) -> None:
    crowd = Crowd(cluster, hot_share=SHARE)
    crowd.publish(HOT)
    crowd.read_until_here(HOT)
    over_tcp, own_pool = crowd.counted(OVER_TCP), crowd.counted(OWN_POOL)
    for _ in range(5):
        assert crowd.read(HOT) == [len(HOT)] * 3
    assert crowd.counted(OVER_TCP) == over_tcp, "nobody reads from the owner any more"
    assert crowd.counted(OWN_POOL) == [before + 5 * len(HOT) for before in own_pool]
    crowd.owner.kill()
    for _ in range(5):
        assert crowd.read(HOT) == [len(HOT)] * 3
    assert crowd.counted(OVER_TCP) == over_tcp


def test_what_the_owner_takes_back_is_found_nowhere(cluster: Cluster) -> None:
    crowd = Crowd(cluster, hot_share=SHARE)
    crowd.publish(HOT)
    crowd.read_until_here(HOT)
    crowd.owner.call("retract", keys=HOT[:4])
    assert crowd.read(HOT[:4]) == [0] * 3
    assert crowd.read(HOT) == [len(HOT) - 4] * 3
    assert crowd.owner.call("counters")["p2pkv_unheard_take_backs_total"] == 0
    crowd.owner.call("bump")
    assert crowd.read(HOT) == [0] * 3
    assert crowd.counted("p2pkv_pool_pages") == [0] * 3


def test_hot_pages_have_their_share_and_no_more(cluster: Cluster) -> None:
    crowd = Crowd(cluster, hot_share=SHARE)
    crowd.publish(MANY)

    def is_full() -> bool:
        assert crowd.read(MANY) == [len(MANY)] * 3
        # nobody else has guests here: these are all that have come, counted where they lie
        assert max(crowd.counted("p2pkv_guest_pages")) * NBYTES <= SHARE * POOL
        return min(crowd.counted("p2pkv_hot_guest_bytes")) == SHARE * POOL

    eventually(is_full, SETTLE_S)
    n_left = crowd.counted('p2pkv_hot_pages_total{outcome="no_room"}')
    eventually(
        lambda: (
            is_full() and min(now - n for now, n in zip(counted_left(crowd), n_left, strict=True)) > len(MANY)
        ),
        SETTLE_S,
    )


def counted_left(crowd: Crowd) -> list[float]:
    return crowd.counted('p2pkv_hot_pages_total{outcome="no_room"}')


def test_nothing_comes_where_it_is_switched_off(cluster: Cluster) -> None:
    """Which it is by default: a node beside them, to which it is not, says when the pages would have come."""
    crowd = Crowd(cluster)
    other: NodeProcess = cluster.start("other", hot_share=SHARE)
    cluster.meet(crowd.owner, *crowd.readers, other)
    crowd.publish(HOT)

    def is_there() -> bool:
        assert crowd.read(HOT) == [len(HOT)] * 3
        other.call("fetch", keys=HOT, nbytes=NBYTES, timeout=5.0)
        return bool(other.call("counters")["p2pkv_hot_guest_pages"] == len(HOT))

    eventually(is_there, SETTLE_S)
    assert crowd.counted("p2pkv_guest_pages") == [0] * 3
    assert crowd.counted(OWN_POOL) == [0] * 3
