"""Who is about to transfer with a node waits until it is there, and not for one that will not come."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from cluster import eventually
from p2pkv.directory.view import Member, State, View
from p2pkv.offers.meeting import Meeting
from transfer_pair import start_nodes

FAR_S = 60.0
SHORT_S = 0.05


class Native:
    """``_native.Transfers``, as far as a meeting knows it."""

    def __init__(self, *, n_refusals: int = 0) -> None:
        self.n_refusals = n_refusals
        self.n_tries = 0
        self.connected: set[int] = set()

    def is_connected(self, key: int) -> bool:
        return key in self.connected

    def connect(self, key: int, boot: int, door: bytes, timeout: float) -> None:
        self.connected.add(key)


class World:
    """A meeting, what it believes of a node, and what happens to whoever connects to that node."""

    def __init__(self, member: Member, *, grace: float, n_refusals: int = 0) -> None:
        self.native = Native(n_refusals=n_refusals)
        self.member = member
        self.view = View([])
        native: Any = self.native
        self.meeting = Meeting(native, self._connect, lambda: self.view, grace=grace)

    def _connect(self, member: Member, name: str, half: bytes, deadline: float) -> tuple[bytes, bytes] | None:
        self.native.n_tries += 1
        return None if self.native.n_tries <= self.native.n_refusals else (b"door", b"")

    def believe(self, *members: Member) -> None:
        self.view = View(members)
        self.meeting.view_changed(self.view)

    def meet(self, seconds: float = FAR_S, boot_epoch: int | None = None) -> bool:
        return self.meeting.meet(self.member.node_id, boot_epoch, time.monotonic() + seconds)


@pytest.fixture
def member() -> Member:
    return Member("a peer", boot_epoch=7, address="127.0.0.1:1")


def test_one_that_comes_is_waited_for_and_connected_to(member: Member) -> None:
    world = World(member, grace=FAR_S)
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(world.meet)
        world.believe(replace(member, state=State.DEAD))
        world.believe(member)
        assert met.result(FAR_S)
    assert world.native.is_connected(member.key)


def test_one_that_is_not_there_is_waited_for_once(member: Member) -> None:
    world = World(member, grace=SHORT_S)
    assert not world.meet()
    began = time.monotonic()
    for _ in range(200):
        assert not world.meet()
    assert time.monotonic() - began < 200 * SHORT_S
    world.believe(member)
    assert world.meet()
    world.believe()
    world.native.connected.clear()
    assert world.meeting._until == {}, "it is waited for anew"


def test_a_deadline_is_kept(member: Member) -> None:
    world = World(member, grace=FAR_S)
    began = time.monotonic()
    assert not world.meet(SHORT_S)
    assert time.monotonic() - began < FAR_S


def test_an_earlier_boot_is_not_waited_for(member: Member) -> None:
    world = World(member, grace=FAR_S)
    world.believe(member)
    assert world.meet(boot_epoch=member.boot_epoch)
    assert not world.meet(boot_epoch=member.boot_epoch - 1)
    assert not world.meet(SHORT_S, boot_epoch=member.boot_epoch + 1)


@pytest.mark.parametrize(("n_refusals", "is_reached"), [(2, True), (1 << 30, False)])
def test_one_that_can_not_be_reached_is_tried_again_for_a_while(
    member: Member, n_refusals: int, is_reached: bool
) -> None:
    world = World(member, grace=FAR_S if is_reached else SHORT_S, n_refusals=n_refusals)
    world.believe(member)
    assert world.meet(), "it is there all the same"
    assert world.native.is_connected(member.key) == is_reached


def test_nobody_waits_when_the_node_is_closed(member: Member) -> None:
    world = World(member, grace=FAR_S)
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(world.meet)
        eventually(lambda: bool(world.meeting._until), 10.0)
        world.meeting.close()
        assert not met.result(FAR_S / 2)


def test_nodes_meet_each_other() -> None:
    producer, consumer = start_nodes("producer", "consumer", pool_size=0)
    try:
        boot = next(m.boot_epoch for m in producer.members() if m.node_id == consumer.node_id)
        assert producer.transfers.meet(consumer.node_id, boot, timeout=FAR_S)
        assert not producer.transfers.meet(consumer.node_id, boot - 1, timeout=FAR_S)
        waiting = threading.Thread(target=lambda: producer.transfers.meet("nobody", timeout=FAR_S))
        waiting.start()
        producer.close()
        waiting.join(FAR_S / 2)
        assert not waiting.is_alive()
    finally:
        consumer.close()
        producer.close()


def test_nothing_is_kept_of_nodes_that_are_not_there(member: Member) -> None:
    world = World(member, grace=FAR_S)
    world.believe(member)
    for number in range(100):
        world.meeting.reach(f"stranger {number}", time.monotonic() + SHORT_S)
    world.meeting.reach(member.node_id, time.monotonic() + FAR_S)
    assert world.meeting.n_remembered == 1
    world.believe()
    assert world.meeting.n_remembered == 0
