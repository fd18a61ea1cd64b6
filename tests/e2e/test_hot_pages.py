"""Pages of one owner that several nodes read all the time come to these nodes, as processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Cluster, NodeProcess, eventually

NBYTES = 64 * 1024
POOL = 16 << 20
SHARE = 0.125
HOT = [f"hot {i}" for i in range(16)]
MANY = [f"many {i}" for i in range(64)]
"""Twice what the share has room for."""
SETTLE_S = 60.0
GUESTS = "p2pkv_fetched_guest_pages_total"
OWN_POOL, OVER_TCP = (f'p2pkv_fetched_pages_total{{source="{source}"}}' for source in ("own_pool", "tcp"))


def was_left_out(node: NodeProcess) -> bool:
    """Whether an owner of entries was ever silent to a node.

    One that waits for a processor is: it is left out of look-ups for a while, and what only it knows is missed.
    """
    return bool(node.call("counters").get("p2pkv_silent_owners_total", 0) > 0)


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

    def finds_all(self, keys: list[str]) -> bool:
        """Have each reader fetch; say whether all found all, as they have to where no owner of entries was silent."""
        n_found = self.read(keys)
        for reader, n in zip(self.readers, n_found, strict=True):
            assert n == len(keys) or was_left_out(reader)
        return n_found == [len(keys)] * 3

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
        has_found_all = crowd.finds_all(MANY)
        # nobody else has guests here: these are all that have come, counted where they lie
        assert max(crowd.counted("p2pkv_guest_pages")) * NBYTES <= SHARE * POOL
        return has_found_all and min(crowd.counted("p2pkv_hot_guest_bytes")) == SHARE * POOL

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


class Attached:
    """An owner, and a host whose node has two engines: they read, and the node does not."""

    def __init__(self, cluster: Cluster, folder: Path, **settings: object) -> None:
        (folder / "host").mkdir(mode=0o700)
        path = f"unix:{folder}/host/s"
        self.owner = cluster.start("owner")
        self.host = cluster.start("host", attach_listen=path, **settings)
        cluster.meet(self.owner, self.host)
        self.engines = [cluster.start(f"engine {i}", attach=path) for i in range(2)]
        assert all(self.owner.call("publish", keys=HOT, nbytes=NBYTES, timeout=10.0))

    def read(self, engine: NodeProcess) -> int:
        answer = engine.call("fetch", keys=HOT, nbytes=NBYTES, timeout=5.0)
        assert answer["wrong"] == []
        return sum(answer["hits"])

    def finds_all(self, engine: NodeProcess) -> bool:
        """Have an engine fetch; say whether it found all, as it has to where no owner of entries was silent."""
        has_found_all = self.read(engine) == len(HOT)
        assert has_found_all or was_left_out(engine)
        return has_found_all

    def read_until_here(self) -> None:
        """Until the host has all of them; the engine tells it once a second what it finds."""

        def are_here() -> bool:
            return self.finds_all(self.engines[0]) and bool(
                self.host.call("counters")["p2pkv_hot_guest_pages"] == len(HOT)
            )

        eventually(are_here, SETTLE_S)


def test_what_an_engine_reads_often_is_served_by_its_own_host(cluster: Cluster, tmp_path: Path) -> None:
    attached = Attached(cluster, tmp_path, hot_share=SHARE)
    attached.read_until_here()
    engine, other = attached.engines

    def reads_from_its_host() -> bool:
        """Read 200 times; say whether nothing came from the owner."""
        before = engine.call("counters")
        for _ in range(200):
            assert attached.read(engine) == len(HOT)
        after = engine.call("counters")
        over_tcp, own_pool, guests = (
            after.get(name, 0) - before.get(name, 0) for name in (OVER_TCP, OWN_POOL, GUESTS)
        )
        assert own_pool == guests == 200 * len(HOT) - over_tcp
        return bool(over_tcp == 0)

    # A host that waits for a processor is passed over in favour of the owner for a moment, and not for good.
    eventually(reads_from_its_host, 15.0)
    assert attached.read(other) == len(HOT)
    assert other.call("counters").get(OVER_TCP, 0) == 0, "other engines of the host have them too"
    attached.owner.kill()
    assert attached.read(engine) == attached.read(other) == len(HOT), "and when the owner is killed"


def test_engines_find_nothing_that_the_owner_has_taken_back(cluster: Cluster, tmp_path: Path) -> None:
    attached = Attached(cluster, tmp_path, hot_share=SHARE)
    attached.read_until_here()
    for engine in attached.engines:
        assert attached.read(engine) == len(HOT)
    for n_left in range(len(HOT) - 1, len(HOT) // 2, -1):
        attached.owner.call("retract", keys=HOT[n_left : n_left + 1])
        assert [attached.read(engine) for engine in attached.engines] == [n_left] * 2
    assert attached.owner.call("counters")["p2pkv_unheard_take_backs_total"] == 0
    attached.owner.call("bump")
    assert [attached.read(engine) for engine in attached.engines] == [0] * 2
    assert attached.host.call("counters")["p2pkv_pool_pages"] == 0


def test_nothing_comes_for_engines_where_it_is_switched_off(cluster: Cluster, tmp_path: Path) -> None:
    """A node beside them, to which it is not, says when the pages would have come."""
    attached = Attached(cluster, tmp_path)
    other = cluster.start("other", hot_share=SHARE)
    cluster.meet(attached.owner, attached.host, other)

    def is_there() -> bool:
        has_found_all = attached.finds_all(attached.engines[0])
        other.call("fetch", keys=HOT, nbytes=NBYTES, timeout=5.0)
        return has_found_all and bool(other.call("counters")["p2pkv_hot_guest_pages"] == len(HOT))

    eventually(is_there, SETTLE_S)
    counted = attached.host.call("counters")
    assert counted["p2pkv_guest_pages"] == 0
    assert counted["p2pkv_attach_requests_total"] == 0, "nor is it told anything"


def test_nothing_comes_where_it_is_switched_off(cluster: Cluster) -> None:
    """Which it is by default: a node beside them, to which it is not, says when the pages would have come."""
    crowd = Crowd(cluster)
    other: NodeProcess = cluster.start("other", hot_share=SHARE)
    cluster.meet(crowd.owner, *crowd.readers, other)
    crowd.publish(HOT)

    def is_there() -> bool:
        has_found_all = crowd.finds_all(HOT)
        other.call("fetch", keys=HOT, nbytes=NBYTES, timeout=5.0)
        return has_found_all and bool(other.call("counters")["p2pkv_hot_guest_pages"] == len(HOT))

    eventually(is_there, SETTLE_S)
    assert crowd.counted("p2pkv_guest_pages") == [0] * 3
    assert crowd.counted(OWN_POOL) == [0] * 3
