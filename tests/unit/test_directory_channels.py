"""Channels to other nodes' shards: used as soon as they are there, and nothing is lost where they are not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster import eventually
from p2pkv import _native
from p2pkv.directory.channels import DirectoryChannels
from p2pkv.directory.view import Member, View
from p2pkv.errors import TransportError
from p2pkv.page import LOCATION, row_pieces
from p2pkv.testing.simulated_network import SimulatedClock
from pair import NBYTES, N, Pair


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    for node in pair.nodes:
        node.close()


def requests(pair: Pair) -> float:
    return float(pair.owner.counters()["p2pkv_directory_requests_total"])


def use_until_there_is_a_channel(pair: Pair) -> list[str]:
    """Publish, and look up from the other node until that goes over a channel."""
    published = pair.publish()

    def asks_over_a_channel() -> bool:
        before = requests(pair)
        pair.reader.exists([f"nobody-has-{os.urandom(4).hex()}"])
        return requests(pair) > before

    eventually(asks_over_a_channel, 10.0)
    return published


def test_look_ups_go_over_a_channel_once_there_is_one(pair: Pair) -> None:
    published = use_until_there_is_a_channel(pair)
    before = pair.owner.counters()["p2pkv_control_requests_total"], requests(pair)
    for _ in range(50):
        keys = [f"missing-{os.urandom(4).hex()}", *published]
        assert pair.reader.exists(keys).tolist() == [0] + [1] * len(published)
    # an owner that a busy machine keeps from answering within 20 ms is asked over the control socket once
    assert requests(pair) >= before[1] + 40
    assert pair.owner.counters()["p2pkv_control_requests_total"] < before[0] + 50  # probes


def test_where_no_channel_leads_the_control_socket_does(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    published = use_until_there_is_a_channel(pair)
    # as a firewall would, that lets nothing but the control port through
    pair.owner._parts.caching.directory_server.close()
    for _ in range(20):
        pair.reader.exists(["a key that no location cache has", *published])
    assert pair.reader.exists(published).all()
    assert pair.reader.fetch(published, pair.destination).all()
    assert pair.owner.publish(pair.fresh_keys(), pair.source).all()
    eventually(lambda: "no directory channel to owner" in caplog.text, 10.0)
    assert caplog.text.count("no directory channel to owner") == 1


def nobody() -> tuple[Member, ...]:
    """Hold no entries of the directory."""
    return ()


class Owner:
    """A shard with a door, and what a control plane would answer for it."""

    def __init__(self) -> None:
        self.server = _native.directory_server("127.0.0.1", "", _native.Shard(1024))
        self.server.announce(7)
        self.member = Member("owner", 7, "127.0.0.1:1")
        self.asked = 0

    def refuse(self, member: Member, name: str, half: bytes, deadline: float) -> tuple[bytes, bytes] | None:
        self.asked += 1
        raise TransportError("not today")


def test_a_node_that_refuses_a_channel_is_left_alone_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    clock = SimulatedClock(100.0)
    channels = DirectoryChannels(owner.refuse, nobody, clock)
    channels.set_view(View([owner.member]))
    assert channels.borrow([owner.member]) == [None]
    eventually(lambda: "its shard is asked over the control socket: not today" in caplog.text, 5.0)
    for _ in range(100):
        assert channels.borrow([owner.member]) == [None]
    assert owner.asked == 1
    clock.now += 1.0
    assert channels.borrow([owner.member]) == [None]
    eventually(lambda: owner.asked == 2, 5.0)
    channels.close()
    owner.server.close()


def test_closing_ends_a_wait_for_a_handshake_nobody_answers() -> None:
    owner = Owner()
    asked = threading.Event()
    closing = threading.Event()

    def answer_late(*_: object) -> None:
        asked.set()
        closing.wait(60.0)

    channels = DirectoryChannels(answer_late, nobody)
    channels.set_view(View([owner.member]))
    assert channels.borrow([owner.member]) == [None]
    assert asked.wait(60.0)
    closing.set()
    channels.close()
    assert channels.borrow([owner.member]) == [None]
    owner.server.close()


def test_what_is_done_meanwhile_is_done_once_whichever_way_owners_are_asked(pair: Pair) -> None:
    directory = pair.owner._cache._directory
    asked = pair.reader.counters

    def put(meanwhile: Callable[[], None]) -> bool:
        """Put entries at the reader's shard; whether that was asked over a channel."""
        before = asked()["p2pkv_directory_requests_total"]
        ids = np.frombuffer(os.urandom(16 * 8), np.uint8).reshape(8, 16)
        assert directory.put(ids, np.zeros(8, LOCATION), time.monotonic() + 5.0, meanwhile=meanwhile).all()
        return asked()["p2pkv_directory_requests_total"] > before

    done: list[bool] = []
    n_calls = 0
    ways = set()
    while ways != {False, True}:
        n_calls += 1
        ways.add(put(lambda: done.append(True)))
        if n_calls > 1000:
            pair.reader._parts.caching.directory_server.close()  # a channel was there at once; now there is none
    assert len(done) == n_calls


def test_a_call_that_breaks_off_before_the_answers_leaves_no_channel_to_the_next(pair: Pair) -> None:
    directory = pair.owner._cache._directory
    reader = [member for member in directory.ring.members if member.node_id == "reader"]

    def idle_channel() -> _native.DirectoryChannel | None:
        (channel,) = directory._channels.borrow(reader)
        if channel is not None:
            directory._channels.give_back(reader, [channel], [True])
        return channel

    def fail() -> None:
        raise RuntimeError("meanwhile")

    eventually(lambda: idle_channel() is not None, 10.0)
    before = idle_channel()
    ids = np.frombuffer(os.urandom(16 * 8), np.uint8).reshape(8, 16)
    with pytest.raises(RuntimeError, match="meanwhile"):
        directory.put(ids, np.zeros(8, LOCATION), time.monotonic() + 5.0, meanwhile=fail)
    assert idle_channel() is not before  # the answer to the old question is on its way there
    assert pair.reader.exists(pair.publish()).all()


def test_pages_published_while_the_ring_changes_are_known_to_the_new_owners(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_until_there_is_a_channel(pair)
    directory, pool = pair.owner._cache._directory, pair.owner._cache._pool
    view = pair.owner._parts.membership.view()
    own = view.get("owner")
    assert own is not None
    directory.set_view(View([own]))
    keys = np.frombuffer(os.urandom(16 * N), np.uint8).reshape(N, 16)
    pieces = row_pieces(pair.source)
    channels = pair.owner._parts.caching.channels
    give_back = channels.give_back

    def change_the_ring(*lent: object) -> None:
        monkeypatch.undo()
        directory.set_view(view)
        give_back(*lent)

    monkeypatch.setattr(channels, "give_back", change_the_ring)  # which is when the old owners have answered
    told = directory.publish(pool, keys, pieces, time.monotonic() + 5.0)
    assert told.is_told.all()
    found, _ = pair.reader._parts.control.shard.get(keys)
    assert found.all()


def test_pages_without_room_are_not_told_of(pair: Pair) -> None:
    use_until_there_is_a_channel(pair)
    directory, pool = pair.owner._cache._directory, pair.owner._cache._pool
    n = pool.native.stats()["capacity"] // NBYTES + 4
    keys = np.frombuffer(os.urandom(16 * n), np.uint8).reshape(n, 16)
    pieces = np.repeat(row_pieces(pair.source)[:1], n, axis=0)
    told = directory.publish(pool, keys, pieces, time.monotonic() + 5.0)
    assert told.n_readable == n - 4
    assert told.is_told.tolist() == [1] * (n - 4) + [0] * 4
    found, _ = pair.reader._parts.control.shard.get(keys)
    assert found.tolist() == told.is_told.tolist()


class _Channel:
    """Notes which leases it was told to release."""

    def __init__(self) -> None:
        self.released: list[int] = []

    def n_late(self) -> int:
        return 0

    def release(self, lease: int) -> bool:
        self.released.append(lease)
        return True


def test_a_lease_that_no_channel_is_free_for_is_released_by_the_next() -> None:
    channels = DirectoryChannels(lambda *_: None, nobody)
    member = Member("owner", 7, "127.0.0.1:1")
    channels.set_view(View([member]))
    channel = _Channel()
    channels.give_back([member], [channel], [True])  # type: ignore[list-item]
    channels.release(member, 1, seconds=60.0)
    assert channel.released == [1], "a free channel waits for nothing"
    (borrowed,) = channels.borrow([member])
    assert borrowed is channel  # type: ignore[comparison-overlap]
    channels.release(member, 2, seconds=60.0)
    channels.release(member, 3, seconds=0.0)  # over by itself before anybody is told
    assert channel.released == [1]
    channels.give_back([member], [borrowed], [True])
    assert channel.released == [1, 2]
    channels.release(member, 4, seconds=60.0)
    assert channel.released == [1, 2, 4]
    channels.close()


def test_everybody_whom_no_channel_leads_to_is_asked_for_one_at_once() -> None:
    asked: set[str] = set()
    members = [Member(f"n{i}", 7, f"127.0.0.1:{i + 1}") for i in range(12)]

    def refuse(member: Member, *_: object) -> None:
        asked.add(member.node_id)

    channels = DirectoryChannels(refuse, nobody)
    channels.set_view(View(members))
    assert channels.borrow(members) == [None] * len(members)
    eventually(lambda: len(asked) == len(members), 10.0)
    channels.close()


def test_channels_unused_for_long_are_closed_but_for_one() -> None:
    clock = SimulatedClock(100.0)
    channels = DirectoryChannels(lambda *_: None, nobody, clock)
    member = Member("owner", 7, "127.0.0.1:1")
    channels.set_view(View([member]))
    for _ in range(3):
        channels.give_back([member], [_Channel()], [True])  # type: ignore[list-item]
    clock.now += 61.0
    channels._close_unused()
    borrowed = [channels.borrow([member])[0] for _ in range(2)]
    assert borrowed[0] is not None
    assert borrowed[1] is None
    channels.give_back([member], borrowed[:1], [True])  # type: ignore[arg-type]
    channels.close()


def test_the_last_channel_to_who_holds_no_entries_closes_when_it_is_unused_for_longer() -> None:
    clock = SimulatedClock(100.0)
    seated, holder = Member("seated", 7, "127.0.0.1:1"), Member("holder", 7, "127.0.0.1:2")
    channels = DirectoryChannels(lambda *_: None, lambda: [seated], clock)
    channels.set_view(View([seated, holder]))

    def is_there(member: Member) -> bool:
        (channel,) = channels.borrow([member])
        if channel is not None:
            channels.give_back([member], [channel], [True])
        return channel is not None

    for member in (seated, holder):
        channels.give_back([member], [_Channel()], [True])  # type: ignore[list-item]
    clock.now += 590.0
    channels._close_unused()
    assert is_there(holder), "it was used ten minutes ago"
    clock.now += 590.0
    channels._close_unused()
    assert is_there(holder), "it was used since"
    clock.now += 610.0
    channels._close_unused()
    assert not is_there(holder)
    assert is_there(seated), "any look-up may ask who has a seat"
    channels.close()


def test_without_a_thread_to_be_had_there_is_no_channel_and_the_next_call_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    asked: list[str] = []

    def refuse(member: Member, *_: object) -> None:
        asked.append(member.node_id)

    member = Member("owner", 7, "127.0.0.1:1")
    channels = DirectoryChannels(refuse, nobody)
    channels.set_view(View([member]))
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", none_left)
        assert channels.borrow([member]) == [None]
    assert channels.borrow([member]) == [None]
    eventually(lambda: asked == ["owner"], 10.0)
    channels.close()
