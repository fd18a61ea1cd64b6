"""Pages are found while nodes join, before their owner has told the newcomers where they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pages
from cluster import eventually
from p2pkv import Config, Node
from p2pkv.directory import newcomers, ring, routes
from p2pkv.directory.announcer import Announcer
from p2pkv.directory.newcomers import Newcomers
from p2pkv.directory.view import Member
from p2pkv.page import Keys
from p2pkv.testing.ports import free_port
from p2pkv.testing.simulated_network import SimulatedClock
from simulated_directory_nodes import DirectoryNode, DirectoryNodes

N, NBYTES = 256, 4096
LONG_AGO = 1_000


def member(name: str, boot_epoch: int = LONG_AGO) -> Member:
    return Member(name, boot_epoch, f"10.0.0.1:{len(name)}")


def test_who_started_long_ago_is_settled_however_new_to_this_node() -> None:
    both = [member("a"), member("b", time.time_ns())]
    assert Newcomers().settled(both, both) == [member("a")]


def test_a_clock_that_is_wrong_makes_nobody_new_for_ever() -> None:
    clock = SimulatedClock(100.0)
    ahead = member("ahead", clock.wall_ns() + 10**15)
    known = Newcomers(clock)
    assert known.settled([ahead], [ahead]) == []
    clock.now += newcomers.SETTLING_S + 1
    assert known.settled([ahead], [ahead]) == [ahead]


def test_who_comes_back_in_another_boot_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Newcomers()
    first, again = member("a"), member("a", time.time_ns())
    assert known.settled([first], [first]) == [first]
    assert known.settled([again], [again]) == []


def test_who_takes_a_seat_is_new_however_long_it_has_been_a_member() -> None:
    clock = SimulatedClock(100.0)
    known, a, b, c = Newcomers(clock), member("a"), member("b"), member("c")
    assert known.settled([a, b], [a, b, c]) == [a, b]
    clock.now += 100.0
    assert known.settled([b, c], [b, c]) == [b]
    clock.now += newcomers.SETTLING_S + 1
    assert known.settled([b, c], [b, c]) == [b, c]


def test_who_is_back_in_its_seat_at_once_is_new_in_it() -> None:
    clock = SimulatedClock(100.0)
    known, a, b = Newcomers(clock), member("a"), member("b")
    assert known.settled([a, b], [a, b]) == [a, b]
    clock.now += 100.0
    assert known.settled([a], [a]) == [a]
    clock.now += 1.0
    assert known.settled([a, b], [a, b]) == [a]
    clock.now += newcomers.SETTLING_S + 1
    assert known.settled([a, b], [a, b]) == [a, b]


def test_who_gives_its_seat_up_is_asked_for_as_long_as_its_successor_is_new() -> None:
    clock = SimulatedClock(100.0)
    known, old, new = Newcomers(clock), member("a"), member("b", SimulatedClock(100.0).wall_ns())
    assert known.settled([old], [old]) == [old]
    clock.now += 1.0
    assert known.settled([new], [old, new]) == [old]
    clock.now += newcomers.SETTLING_S
    assert known.settled([new], [old, new]) == [old]
    clock.now += 1.0
    assert known.settled([new], [old, new]) == [new]
    assert known.settled([new], [new]) == [new]


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectoryNodes]:
    """Have members for whom there are too few seats."""
    monkeypatch.setattr(ring, "SEATS", 6)
    crowded = DirectoryNodes(*(f"n{i}" for i in range(12)), page_nbytes=64)
    yield crowded
    crowded.close()


def seated(node: DirectoryNode) -> list[str]:
    return [member.node_id for member in node.directory.ring.seated]


def owners_of(keys: Keys, node: DirectoryNode) -> list[set[str]]:
    now = node.directory.ring
    return [{now.members[index].node_id for index in owners} for owners in now.owners(keys)]


def test_what_one_owner_of_before_still_knows_is_found_when_others_take_the_seats_of_the_lost(
    crowded: DirectoryNodes,
) -> None:
    lost = seated(crowded.nodes["n0"])[:3]
    publisher, reader, *_ = (node for name, node in crowded.nodes.items() if name not in lost)
    keys = publisher.publish(1000)
    is_known = np.array([not owners <= set(lost) for owners in owners_of(keys, publisher)])
    for name in lost:
        crowded.remove(name)
    crowded.set_view(*crowded.nodes)
    assert len(seated(reader)) == 6
    found = reader.directory.get(keys, reader.clock.now + 5.0)[0].astype(bool)
    assert (found == is_known).all()
    assert 0 < is_known.sum() < len(keys), "nobody has lost both entries: the test proves nothing"
    crowded.run(5.0)
    assert reader.n_found(keys) == len(keys)


def test_what_those_know_who_give_their_seats_up_to_newcomers_is_found(crowded: DirectoryNodes) -> None:
    publisher, reader = crowded.nodes["n0"], crowded.nodes["n1"]
    keys = publisher.publish(1000)
    before = owners_of(keys, publisher)
    for i in range(60):
        crowded.add(f"new{i}")
    crowded.set_view(*crowded.nodes)
    n_moved = sum(owners.isdisjoint(seated(reader)) for owners in before)
    assert n_moved > 0, "each page has an owner that has kept its seat: the test proves nothing"
    assert reader.n_found(keys) == len(keys)


@pytest.fixture
def owes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Have owners put nothing again until the event is set, as one with a busy interpreter does."""
    may_repair = threading.Event()
    step = Announcer.step
    monkeypatch.setattr(Announcer, "step", lambda self: step(self) if may_repair.is_set() else 0.05)
    # a test's busy machine may take as long to start the nodes
    monkeypatch.setattr(newcomers, "SETTLING_S", 60.0)
    monkeypatch.setattr(routes, "SETTLING_S", 60.0)
    yield may_repair
    may_repair.set()


class Joining:
    """An owner, and three nodes that join it while it tells nobody anything; the last of them reads."""

    def __init__(self, folder: Path) -> None:
        secret = folder / "secret"
        secret.write_text("the secret of a test, long enough\n")
        secret.chmod(0o600)
        self._settings = {
            "secret_file": str(secret),
            "join": [f"127.0.0.1:{free_port()}"],
            "pool_size": 4 << 20,
            "deadline": 5.0,
        }
        self.nodes: list[Node] = []
        self.keys = [f"page-{i}" for i in range(N)]
        memory = np.zeros((N, NBYTES), np.uint8)
        self.start("owner").register_memory(memory)
        pages.fill(memory, self.keys)
        assert self.nodes[0].publish(self.keys, memory).all()
        for name in ("second", "third", "reader"):
            self.start(name)
        eventually(lambda: all(len(node.members()) == 4 for node in self.nodes), 20.0)
        self.destination = np.zeros((N, NBYTES), np.uint8)
        self.nodes[-1].register_memory(self.destination)

    def start(self, node_id: str) -> Node:
        node = Node.start(Config.load(self._settings | {"node_id": node_id}, environ={}))
        self.nodes.append(node)
        return node

    def n_hits(self) -> int:
        """Fetch every page; a wrong byte is an error."""
        outcomes = self.nodes[-1].fetch(self.keys, self.destination)
        assert pages.wrong(self.destination, self.keys, outcomes) == []
        return int((outcomes > 0).sum())

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def settled_by_name(_: Newcomers, seated: tuple[Member, ...], present: tuple[Member, ...]) -> list[Member]:
    """The owner was there before; here all have started within seconds."""
    return [member for member in present if member.node_id == "owner"]


def test_pages_whose_entries_belong_to_newcomers_are_found(
    tmp_path: Path, owes: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Newcomers, "settled", settled_by_name)
    joining = Joining(tmp_path)
    try:
        assert joining.n_hits() == N
        asked = joining.nodes[-1].counters()['p2pkv_looked_up_pages_total{source="earlier_owners"}']
        assert asked > 0, "no entry had moved away: the test proves nothing"
    finally:
        owes.set()
        joining.close()


def test_without_those_who_were_there_before_they_are_missed_until_they_are_put_again(
    tmp_path: Path, owes: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Newcomers, "settled", lambda _, seated, present: list(present))
    joining = Joining(tmp_path)
    try:
        assert joining.n_hits() < N
        owes.set()
        eventually(lambda: joining.n_hits() == N, 20.0)
    finally:
        joining.close()
