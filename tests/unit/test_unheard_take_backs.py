"""What a source takes back while it and the holder of its guests are no members of each other, or one is given up.

Its take-backs are made by hand and told to nobody, as it makes them then; the holder asks when the test says so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cluster import eventually
from p2pkv import Config, Node
from p2pkv.cache import guests
from p2pkv.cache.guests import StoreStatus
from p2pkv.control.sockets import Calls, Request
from p2pkv.control.wire import U64, Kind
from p2pkv.directory.view import Member, State, View, encode, node_key
from p2pkv.page import as_bytes
from p2pkv.parts.cache import CacheParts
from p2pkv.testing.ports import free_port

PAGE = 4096
KEYS = ["a", "b", "c", "d"]
SOURCE = node_key("source")


def caching_of(node: Node) -> CacheParts:
    caching = node._parts.caching
    assert isinstance(caching, CacheParts)
    return caching


def record_of(node: Node) -> Member:
    return next(member for member in node.members() if member.node_id == node.node_id)


class Pair:
    """A source, the holder of its guests, and an engine that is attached to the holder."""

    def __init__(self, path: str) -> None:
        self.join = [f"127.0.0.1:{free_port()}"]
        self.holder = Node.start(
            Config(node_id="holder", join=self.join, pool_size=64 * PAGE, buffer_size=0, attach_listen=path)
        )
        self.source = self.start_source()
        self.engine = Node.start(Config(node_id="engine", attach=path))
        self.ids = caching_of(self.holder).cache.hash(KEYS)[1]
        self.memory = np.arange(len(KEYS) * PAGE, dtype=np.uint8).reshape(len(KEYS), PAGE)

    def start_source(self) -> Node:
        """Start it, in the end for the second time; it hands nothing over when it ends."""
        self.source = Node.start(
            Config(node_id="source", join=self.join, pool_size=64 * PAGE, buffer_size=0, drain=0.0)
        )
        eventually(lambda: self.sees(record_of(self.source).boot_epoch), 30.0)
        return self.source

    def sees(self, boot: int) -> bool:
        """Whether the holder knows the source in this boot."""
        member = caching_of(self.holder).members().get(SOURCE)
        return member is not None and member.boot_epoch == boot

    def bring(self) -> None:
        """Bring the source's pages to the holder, as a prefetch does, without its thread, which would ask as well."""
        with self.source.register_memory(self.memory):
            assert self.source.publish(KEYS, self.memory).all()
        found, locations = caching_of(self.source).pool.lookup(self.ids)
        assert found.all()
        caching = caching_of(self.holder)
        word = caching.sources.follow(self.ids, locations, time.monotonic() + 30.0)[SOURCE]
        assert word.is_own.all()
        addresses = self.memory.ctypes.data + np.arange(len(KEYS), dtype=np.int64) * PAGE
        origins = np.tile(np.array([SOURCE, word.log, word.number], np.uint64), (len(KEYS), 1))
        statuses, _ = caching.guests.store(self.ids, addresses, origins, as_bytes(locations), 0)
        assert (statuses == StoreStatus.STORED).all()

    def take_back_untold(self) -> None:
        """Have the source take all back while the holder is no member to it."""
        caching = caching_of(self.source)
        caching.pool.retract(self.ids)
        caching.guests.count_taken_back()

    def ask(self) -> int:
        """Have the holder ask its sources, as it does every second; return how many there are."""
        return caching_of(self.holder).sources.poll(time.monotonic() + 30.0)

    def n_there(self) -> int:
        return int(caching_of(self.holder).pool.lookup(self.ids)[0].sum())

    def are_found_by_engines(self) -> bool:
        own_host = self.engine._parts.own_host
        pool = own_host.pool.get()
        return pool is not None and pool.are_guests_believed

    def tell(self, node: Node, record: Member) -> None:
        """Tell a node what a member believes of that."""
        blob = encode("another", [record])
        reply = caching_of(self.holder)._control.client.ask(Request(node.address, Kind.GOSSIP, blob), 30.0)
        assert reply is not None
        assert reply.ok

    def close(self) -> None:
        self.engine.close()
        self.source.close()
        self.holder.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    tmp_path.chmod(0o700)
    pair = Pair(f"unix:{tmp_path}/s")
    yield pair
    pair.close()


def test_a_source_that_goes_on_in_place_under_a_higher_boot_is_asked_again(pair: Pair) -> None:
    pair.bring()
    pair.take_back_untold()
    before = record_of(pair.source)
    pair.tell(pair.source, replace(before, boot_epoch=before.boot_epoch + 1, state=State.DEAD))
    eventually(lambda: pair.sees(before.boot_epoch + 2), 30.0)
    pair.ask()
    pair.ask()
    assert pair.n_there() == 0


def test_what_a_source_took_back_while_it_was_away_goes_when_its_next_run_answers(pair: Pair) -> None:
    pair.bring()
    assert pair.ask() == 1
    pair.take_back_untold()
    pair.source.close()
    eventually(lambda: SOURCE not in caching_of(pair.holder).members(), 30.0)
    assert pair.n_there() == len(KEYS)  # it may be gone for good, and then they are all there is
    pair.start_source()
    pair.ask()
    assert pair.n_there() == 0


def test_a_holder_that_was_taken_for_dead_answers_for_no_guest_until_it_has_asked_again(pair: Pair) -> None:
    pair.bring()
    assert pair.ask() == 1
    eventually(pair.are_found_by_engines, 30.0)
    pair.take_back_untold()
    before = record_of(pair.holder)
    pair.tell(pair.holder, replace(before, state=State.DEAD))
    eventually(lambda: record_of(pair.holder).incarnation > before.incarnation, 30.0)
    eventually(lambda: not pair.are_found_by_engines(), 10.0)
    pair.ask()
    assert not pair.are_found_by_engines()
    pair.ask()
    assert pair.n_there() == 0
    eventually(pair.are_found_by_engines, 30.0)


def test_a_holder_that_was_given_up_by_mistake_hears_what_is_taken_back_all_the_same(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests, "MOMENT_S", 10.0)  # it answers in time, however busy the machine is
    pair.bring()
    source = caching_of(pair.source)
    source._control.given_up.view_changed(View(), [record_of(pair.holder)])
    source.followers._members = dict
    assert pair.source.retract(KEYS).all()
    assert pair.n_there() == 0
    assert pair.source.counters()["p2pkv_unheard_take_backs_total"] == 0


def test_a_holder_that_is_given_up_at_that_moment_hears_what_is_taken_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question who is a member and the one who was given up."""
    monkeypatch.setattr(guests, "MOMENT_S", 10.0)  # it answers in time, however busy the machine is
    pair.bring()
    holder, followers, n_asked = record_of(pair.holder), caching_of(pair.source).followers, 0

    def members() -> dict[int, Member]:
        nonlocal n_asked
        n_asked += 1
        return {holder.key: holder} if n_asked == 1 else {}

    def given_up() -> list[Member]:
        nonlocal n_asked
        n_asked += 1
        return [holder] if n_asked > 1 else []

    followers._members, followers._given_up = members, given_up
    assert pair.source.retract(KEYS).all()
    assert pair.n_there() == 0


def test_who_was_given_up_and_has_died_does_not_hold_up_what_is_taken_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who lives is told of each batch, and of the next call as well."""
    monkeypatch.setattr(guests, "MAX_ENTRIES", 1)
    monkeypatch.setattr(guests, "_LET_BE_S", 600.0)
    source = caching_of(pair.source)
    followers, holder = source.followers, record_of(pair.holder)
    dead = Member("dead", 1, f"127.0.0.1:{free_port()}")
    for each in (holder, dead):
        follow = Request(pair.source.address, Kind.FOLLOW, U64.pack(each.key), count=0)
        reply = source._control.client.ask(follow, 30.0)
        assert reply is not None
        assert reply.ok
    client, asked = followers._client, Counter[str]()

    def send(requests: Sequence[Request]) -> Calls:
        asked.update(request.address for request in requests)
        return client.send(requests)

    monkeypatch.setattr(followers, "_client", SimpleNamespace(send=send))
    monkeypatch.setattr(followers, "_given_up", lambda: [dead])
    for _ in range(2):
        followers.tell(pair.ids, time.monotonic() + 30.0)
    assert asked == {dead.address: 1, holder.address: 2 * len(KEYS)}
    monkeypatch.setattr(guests, "_LET_BE_S", 0.0)
    followers._let_be.clear()
    for _ in range(2):
        followers.tell(pair.ids[:1], time.monotonic() + 30.0)
    assert asked[dead.address] == 3


def test_a_source_for_which_engines_find_no_guests_is_counted(pair: Pair) -> None:
    def n_silent() -> float:
        return pair.holder.counters()["p2pkv_silent_sources"]

    pair.bring()
    pair.source.close()
    eventually(lambda: SOURCE not in caching_of(pair.holder).members(), 30.0)
    assert pair.ask() == 1
    assert pair.n_there() == len(KEYS)
    assert n_silent() == 0  # it may be gone for good, and nothing was missed before
    before = record_of(pair.holder)
    pair.tell(pair.holder, replace(before, state=State.DEAD))
    eventually(lambda: pair.ask() == 1 and n_silent() == 1, 30.0)
    assert not pair.are_found_by_engines()
    caching_of(pair.holder).guests.evict(pair.ids)
    assert pair.ask() == 0
    assert n_silent() == 0
    eventually(pair.are_found_by_engines, 30.0)
