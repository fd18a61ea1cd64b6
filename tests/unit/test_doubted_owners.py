"""A look-up asks those who are suspected where no other owner answers: one of them may be there, and alone may know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from p2pkv import _native
from p2pkv.control.sockets import Request
from p2pkv.directory.asking import SILENT_OWNER_S
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.ring import Ring
from p2pkv.directory.view import Member, State, View, node_key
from p2pkv.page import LOCATION, Namespace
from p2pkv.testing.simulated_directory import NoChannels, SimulatedAnswers, SimulatedControl
from simulated_directory_nodes import DirectoryNodes

N_PAGES = 64
SECONDS = 5.0
"""A call's time."""


class CountingControl(SimulatedControl):
    """It counts whom it asks of how many keys."""

    asked: Counter[str]

    def send(self, requests: Sequence[Request]) -> SimulatedAnswers:
        """Count, and ask."""
        for request in requests:
            self.asked[request.address.partition(":")[0]] += request.count
        return super().send(requests)


class Reader:
    """A node without pages, and which owns no entries; in its view ``suspects`` are suspected."""

    def __init__(self, nodes: DirectoryNodes, *suspects: str) -> None:
        node = nodes.nodes["reader"]
        self.clock = node.clock
        self.control = CountingControl(nodes.reach, self.clock)
        self.control.asked = Counter()
        self.directory = DirectoryClient(
            own_key=node_key("reader"),
            shard=node.shard,
            client=self.control,
            channels=NoChannels(),
            replicas=2,
            metrics=node.metrics,
            clock=self.clock,
        )
        self.view = View(
            replace(
                each.member,
                state=State.SUSPECT if name in suspects else State.ALIVE,
                weight=0.0 if name == "reader" else 1.0,
            )
            for name, each in nodes.nodes.items()
        )
        self.directory.set_view(self.view)

    def look_up(self, keys: np.ndarray) -> np.ndarray:
        self.clock.now += 1.0
        self.began = self.clock.now
        found, _ = self.directory.get(keys, self.clock.now + SECONDS)
        self.took = self.clock.now - self.began
        return found.astype(bool)

    def owned_by(self, keys: np.ndarray, *names: str) -> np.ndarray:
        """Return which of the keys have no other owners than these."""
        members = self.directory.ring.members
        of_these = [index for index, member in enumerate(members) if member.node_id in names]
        return np.isin(self.directory.ring.owners(keys), of_these).all(axis=1)


@pytest.fixture
def nodes() -> Iterator[DirectoryNodes]:
    nodes = DirectoryNodes("a", "b", "c", "reader")
    yield nodes
    nodes.close()


def _published(nodes: DirectoryNodes) -> np.ndarray:
    """Publish pages whose owners are a, b and c, as the reader's ring has it."""
    for node in nodes.nodes.values():
        node.directory.set_view(
            View(
                replace(each.member, weight=0.0 if name == "reader" else 1.0)
                for name, each in nodes.nodes.items()
            )
        )
    keys = nodes.nodes["c"].publish(N_PAGES)
    nodes.run(5.0)
    return keys


def test_a_suspect_is_asked_where_the_other_owner_is_silent(nodes: DirectoryNodes) -> None:
    keys = _published(nodes)
    reader = Reader(nodes, "b")
    of_both = reader.owned_by(keys, "a", "b")
    assert 0 < of_both.sum() < N_PAGES, "the test proves nothing"
    nodes.nodes["a"].is_stopped = True
    assert reader.look_up(keys).all()
    assert reader.took < SECONDS / 2
    assert reader.control.asked["b"] == of_both.sum()


def test_a_suspect_that_is_an_only_owner_has_no_more_time_than_the_silent(nodes: DirectoryNodes) -> None:
    keys = _published(nodes)
    reader = Reader(nodes, "a", "b")
    of_both = reader.owned_by(keys, "a", "b")
    assert reader.look_up(keys).all(), "both suspects are there"
    nodes.nodes["a"].is_stopped = nodes.nodes["b"].is_stopped = True
    assert (reader.look_up(keys) == ~of_both).all()
    assert reader.took < 4 * SILENT_OWNER_S


def test_a_healthy_owner_is_waited_for_though_others_are_suspected(nodes: DirectoryNodes) -> None:
    keys = _published(nodes)
    reader = Reader(nodes, "b")
    nodes.nodes["a"].is_stopped = nodes.nodes["b"].is_stopped = True
    assert (reader.look_up(keys) == ~reader.owned_by(keys, "a", "b")).all()
    assert reader.took == pytest.approx(SECONDS, abs=0.1)


def test_suspects_are_left_alone_where_an_owner_answers(nodes: DirectoryNodes) -> None:
    keys = _published(nodes)
    reader = Reader(nodes, "b")
    strange = np.random.default_rng(7).integers(0, 256, (N_PAGES, 16), np.uint8)
    assert reader.look_up(keys).all()
    assert not reader.look_up(strange).any()
    assert reader.control.asked["b"] == 0


def _in_turn(own: int = -1) -> tuple[np.ndarray, _native.AskBatch, np.ndarray, np.ndarray]:
    """Return a key of two owners, 0 being healthy and 1 suspected, what asks for it, and where the answer goes."""
    ring = Ring([Member("a", 1, "10.0.0.1:1"), Member("b", 1, "10.0.0.2:1")], 2)
    healthy = np.array([1, 0], np.uint8)
    table = _native.RingTable(ring.points, ring.successors, healthy, own)
    keys = Namespace("ring").hash(["page"])
    ask = _native.AskBatch(keys, None, table, in_turn=True)
    return keys, ask, np.zeros(1, np.uint8), np.zeros((1, LOCATION.itemsize), np.uint8)


def _asked_of(ask: _native.AskBatch, member: int) -> int:
    return [owner for owner, _ in ask.asks()].index(member)


def test_what_a_suspect_says_ends_no_wait_for_a_healthy_owner() -> None:
    keys, ask, found, locations = _in_turn()
    assert ask.is_heard(), "the healthy one is silent: the suspect is to be asked"
    again = ask.of_doubted(keys)
    assert again is not None
    assert not again.is_heard()
    assert again.take_found(_asked_of(again, 1), b"\0", found, locations)
    assert not again.is_heard(), "it may have been put past the suspect"
    assert not again.is_settled()
    assert again.take_found(_asked_of(again, 0), b"\1" + b"\7" * LOCATION.itemsize, found, locations)
    assert again.is_settled()
    assert found.all()
    assert again.of_doubted(keys) is None


def test_who_has_refused_is_not_waited_for_as_a_healthy_owner_is() -> None:
    keys, ask, _, _ = _in_turn()
    ask.refuse(0)
    assert ask.is_settled()
    again = ask.of_doubted(keys)
    assert again is not None
    assert again.is_heard()
    assert not again.is_settled()


def test_what_a_healthy_owner_does_not_have_no_suspect_is_asked_for() -> None:
    keys, ask, found, locations = _in_turn()
    assert ask.take_found(0, b"\0", found, locations)
    assert ask.is_settled()
    assert ask.of_doubted(keys) is None


def test_what_this_node_does_not_have_itself_no_suspect_is_asked_for() -> None:
    keys, ask, _, _ = _in_turn(own=0)
    assert ask.is_settled()
    assert ask.of_doubted(keys) is None
