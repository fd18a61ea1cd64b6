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
from p2pkv.directory import newcomers, routes
from p2pkv.directory.announcer import Announcer
from p2pkv.directory.newcomers import Newcomers
from p2pkv.directory.view import Member
from p2pkv.testing.ports import free_port
from p2pkv.testing.simulated_network import SimulatedClock

N, NBYTES = 256, 4096
LONG_AGO = 1_000


def member(name: str, boot_epoch: int = LONG_AGO) -> Member:
    return Member(name, boot_epoch, f"10.0.0.1:{len(name)}")


def test_who_started_long_ago_is_settled_however_new_to_this_node() -> None:
    assert Newcomers().settled([member("a"), member("b", time.time_ns())]) == [member("a")]


def test_a_clock_that_is_wrong_makes_nobody_new_for_ever() -> None:
    clock = SimulatedClock(100.0)
    ahead = member("ahead", clock.wall_ns() + 10**15)
    known = Newcomers(clock)
    assert known.settled([ahead]) == []
    clock.now += newcomers.SETTLING_S + 1
    assert known.settled([ahead]) == [ahead]


def test_who_comes_back_in_another_boot_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Newcomers()
    first, again = member("a"), member("a", time.time_ns())
    assert known.settled([first]) == [first]
    assert known.settled([again]) == []


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


def settled_by_name(_: Newcomers, members: tuple[Member, ...]) -> list[Member]:
    """The owner was there before; here all have started within seconds."""
    return [member for member in members if member.node_id == "owner"]


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
    monkeypatch.setattr(Newcomers, "settled", lambda _, members: list(members))
    joining = Joining(tmp_path)
    try:
        assert joining.n_hits() < N
        owes.set()
        eventually(lambda: joining.n_hits() == N, 20.0)
    finally:
        joining.close()
