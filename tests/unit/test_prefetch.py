"""Prefetch, pin and hand over. The hunt `guests` looks for pages that were taken back and are found all the same."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import pages
from cluster import eventually
from p2pkv import ClosedError, Config, Node, PrefetchOutcome, TransportError, UsageError
from p2pkv.control.sockets import Request
from p2pkv.control.wire import Kind, ReplyStatus
from p2pkv.disk.tier import DiskTier
from p2pkv.memory.registered import Memory
from p2pkv.page import HAS_DISK, Namespace

PAGE = 4096
POOL = 64 * PAGE
KEYS = [f"k{i}" for i in range(12)]
ALL_BROUGHT = [PrefetchOutcome.BROUGHT] * len(KEYS)


@pytest.fixture
def start() -> Iterator[Callable[..., Node]]:
    nodes: dict[str, Node] = {}

    def start(node_id: str, **settings: object) -> Node:
        join = [node.address for node in nodes.values()][:1]
        defaults = {"pool_size": POOL, "buffer_size": 0, "deadline": 5.0, "join": join}
        nodes[node_id] = node = Node.start(Config(node_id=node_id, **(defaults | settings)))  # type: ignore[arg-type]
        eventually(lambda: all(knows(other, node) for other in nodes.values()), 30.0)
        return node

    yield start
    for node in reversed(nodes.values()):
        node.close()


def knows(one: Node, other: Node) -> bool:
    """Whether one node, unless it is closed, knows another as it is now."""
    own = next(member for member in other.members() if member.node_id == other.node_id)
    try:
        return any((m.node_id, m.boot_epoch) == (own.node_id, own.boot_epoch) for m in one.members())
    except ClosedError:
        return True


def published(node: Node, keys: list[str] = KEYS) -> None:
    memory = np.zeros((len(keys), PAGE), np.uint8)
    pages.fill(memory, keys)
    with node.register_memory(memory):
        for first in range(0, len(keys), 16):
            batch = slice(first, first + 16)
            assert node.publish(keys[batch], memory[batch]).all()


def none_left(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def found(node: Node, keys: list[str] = KEYS) -> list[bool]:
    """Say which pages a node finds; a wrong byte is an error."""
    memory = np.zeros((len(keys), PAGE), np.uint8)
    with node.register_memory(memory):
        hits = node.fetch(keys, memory)
    assert pages.wrong(memory, keys, hits) == []
    return [bool(hit) for hit in hits]


def brought(node: Node, keys: list[str] = KEYS) -> list[PrefetchOutcome]:
    prefetch = node.prefetch(keys)
    assert prefetch.wait(60.0)
    return [PrefetchOutcome(outcome) for outcome in prefetch.outcomes.tolist()]


def in_pool(node: Node, keys: list[str] = KEYS) -> int:
    caching = node._parts.caching
    assert caching is not None
    there, _ = caching.pool.lookup(caching.cache.hash(keys)[1])
    return int(there.sum())


def fresh(n: int, name: str = "new") -> list[str]:
    return [f"{name} {i}" for i in range(n)]


def tier_of(node: Node) -> DiskTier:
    caching = node._parts.caching
    assert caching is not None
    assert caching.tier is not None
    return caching.tier


def test_what_is_prefetched_is_in_the_pool_and_outlives_its_owner(start: Callable[..., Node]) -> None:
    owner, other, third = start("owner"), start("other"), start("third")
    published(owner)
    assert brought(other) == ALL_BROUGHT
    assert brought(other) == [PrefetchOutcome.PRESENT] * len(KEYS)
    assert other.counters()["p2pkv_guest_pages"] == len(KEYS)
    owner.close()
    eventually(lambda: len(other.members()) == 2, 30.0)
    assert all(found(other))
    eventually(lambda: all(found(third)), 30.0)  # the directory knows of the guest too


def test_what_its_owner_takes_back_goes_here_as_well(start: Callable[..., Node]) -> None:
    owner, other = start("owner"), start("other")
    published(owner)
    assert brought(other) == ALL_BROUGHT
    owner.retract(KEYS[:4])
    assert found(other) == [False] * 4 + [True] * 8
    owner.clear()
    assert found(other) == [False] * len(KEYS)
    assert other.counters()["p2pkv_taken_back_guests_total"] == len(KEYS)
    assert not owner.counters().get("p2pkv_unheard_take_backs_total")


def test_what_its_owner_takes_back_after_evicting_it_goes_too(start: Callable[..., Node]) -> None:
    owner, other = start("owner"), start("other")
    published(owner)
    assert brought(other) == ALL_BROUGHT
    published(owner, fresh(64))
    assert in_pool(owner) == 0
    assert all(found(other))
    owner.retract(KEYS)
    assert found(other) == [False] * len(KEYS)


def test_what_the_owners_next_run_takes_back_goes_too(start: Callable[..., Node], tmp_path: Path) -> None:
    other = start("other")
    disk = {"disk_size": "8MiB", "disk_path": str(tmp_path / "disk")}
    owner = start("owner", **disk)
    published(owner)
    assert brought(other) == ALL_BROUGHT
    assert tier_of(owner).flush(30.0)
    owner.close()
    eventually(lambda: len(other.members()) == 1, 30.0)
    assert all(found(other))
    start("owner", **disk).retract(KEYS)
    assert found(other) == [False] * len(KEYS)


def test_a_bump_ends_what_was_prefetched(start: Callable[..., Node]) -> None:
    owner, other = start("owner"), start("other")
    published(owner)
    assert brought(other) == ALL_BROUGHT
    owner.bump()
    assert found(other) == [False] * len(KEYS)
    assert in_pool(other, KEYS) == 0


def test_what_is_published_over_a_guest_is_the_nodes_own(start: Callable[..., Node]) -> None:
    owner, other = start("owner"), start("other")
    published(owner)
    assert brought(other) == ALL_BROUGHT
    published(other, KEYS[:6])
    owner.retract(KEYS)
    assert found(other) == [True] * 6 + [False] * 6


def test_a_guest_does_not_come_to_the_disk(start: Callable[..., Node], tmp_path: Path) -> None:
    owner = start("owner")
    other = start("other", disk_size="8MiB", disk_path=str(tmp_path / "disk"), disk_write="on_evict")
    published(owner)
    assert brought(other) == ALL_BROUGHT
    published(other, fresh(128))
    tier = tier_of(other)
    tier.flush(30.0)
    caching = other._parts.caching
    assert caching is not None
    assert not tier.contains(caching.cache.hash(KEYS)[1]).any()


def test_where_a_guest_lies_promises_no_disk(start: Callable[..., Node], tmp_path: Path) -> None:
    """Who finds it evicted looks for its owner, and does not ask a disk that never has it."""
    owner = start("owner")
    other = start("other", disk_size="8MiB", disk_path=str(tmp_path / "disk"))
    published(owner)
    eventually(lambda: set(brought(other)) <= {PrefetchOutcome.PRESENT, PrefetchOutcome.BROUGHT}, 30.0)
    own = fresh(2)
    published(other, own)
    cache = other._cache
    for keys, has_disk in ((KEYS, 0), (own, HAS_DISK)):
        there, where = cache._pool.lookup(cache.hash(keys)[1])
        assert there.all()
        assert set(where["flags"] & HAS_DISK) == {has_disk}


def test_pages_on_disks_are_brought_from_there(start: Callable[..., Node], tmp_path: Path) -> None:
    owner = start("owner", disk_size="8MiB", disk_path=str(tmp_path / "disk"))
    other = start("other")
    published(owner)
    assert tier_of(owner).flush(30.0)
    published(owner, fresh(64))
    assert in_pool(owner) == 0
    there = {PrefetchOutcome.BROUGHT, PrefetchOutcome.PRESENT}
    eventually(lambda: set(brought(other)) <= there, 30.0)
    assert in_pool(other) == len(KEYS)
    published(owner, fresh(64, "newer"))
    eventually(lambda: set(brought(owner)) <= there, 30.0)  # its own disk's
    assert in_pool(owner) == len(KEYS)


def test_pages_that_are_nowhere_are_not_found(start: Callable[..., Node]) -> None:
    start("owner")
    assert brought(start("other")) == [PrefetchOutcome.NOT_FOUND] * len(KEYS)


def test_a_third_node_is_not_brought_what_is_a_guest_itself(start: Callable[..., Node]) -> None:
    owner, other, third = start("owner"), start("other"), start("third")
    published(owner)
    assert brought(other) == ALL_BROUGHT
    owner.close()
    eventually(lambda: len(third.members()) == 2, 30.0)
    eventually(lambda: set(brought(third)) == {PrefetchOutcome.NOT_OWNED}, 30.0)
    assert all(found(third))


def test_a_prefetch_fills_its_share_and_no_more(start: Callable[..., Node]) -> None:
    owner, other = start("owner"), start("other", prefetch_share=0.125)
    published(owner)
    assert brought(other) == ALL_BROUGHT[:8] + [PrefetchOutcome.NO_ROOM] * 4


def test_a_closed_prefetch_brings_nothing_more(start: Callable[..., Node]) -> None:
    node = start("node")
    first, second = node.prefetch(fresh(5000)), node.prefetch(KEYS)
    second.close()
    assert second.done()
    assert set(second.outcomes.tolist()) <= {PrefetchOutcome.CANCELED, PrefetchOutcome.NOT_FOUND}
    first.close()
    first.close()
    assert first.wait(60.0)


@pytest.mark.parametrize("timeout", [math.inf, 1e300])
def test_a_prefetch_is_waited_for_however_long_it_takes(start: Callable[..., Node], timeout: float) -> None:
    assert start("node").prefetch(fresh(5000)).wait(timeout)


def test_closing_a_node_ends_its_prefetches(start: Callable[..., Node]) -> None:
    node = start("node")
    prefetch = node.prefetch(fresh(5000))
    node.close()
    assert prefetch.done()
    assert PrefetchOutcome.PENDING not in prefetch.outcomes.tolist()


def test_too_many_prefetches_are_refused(start: Callable[..., Node]) -> None:
    node = start("node")
    prefetches = [node.prefetch(fresh(1 << 17)) for _ in range(4)]
    assert set(prefetches[-1].outcomes.tolist()) == {PrefetchOutcome.REFUSED}
    assert prefetches[-1].done()


@pytest.mark.parametrize("timeout", [0, -1, 4000, True, "1"])
def test_a_timeout_that_is_none_is_refused(start: Callable[..., Node], timeout: object) -> None:
    node = start("node")
    with pytest.raises(UsageError, match="timeout must be above 0 and at most 3600 seconds, not"):
        node.prefetch(KEYS, timeout=timeout)  # type: ignore[arg-type]


def test_pinned_pages_stay_until_they_are_released(start: Callable[..., Node]) -> None:
    node = start("node")
    published(node)
    with node.pin(KEYS, 60.0) as pin:
        assert pin.outcomes.all()
        assert 0 < pin.seconds_left <= 60
        assert node.counters()["p2pkv_pins_bytes"] == len(KEYS) * PAGE
        published(node, fresh(128))
        assert in_pool(node) == len(KEYS)
    assert pin.release() == 0
    assert pin.seconds_left == 0
    published(node, fresh(128, "newer"))
    assert in_pool(node) == 0


def test_a_pin_that_nobody_releases_ends(start: Callable[..., Node]) -> None:
    node = start("node")
    published(node)
    node.pin(KEYS, 0.05)
    eventually(lambda: node.counters()["p2pkv_pins_bytes"] == 0, 30.0)
    published(node, fresh(128))
    assert in_pool(node) == 0


def test_pins_hold_their_share_and_no_more(start: Callable[..., Node]) -> None:
    node = start("node", pin_share=0.125)
    published(node)
    first, second = node.pin(KEYS[:6], 60.0), node.pin(KEYS[6:], 60.0)
    assert first.outcomes.all()
    assert second.outcomes.tolist() == [1, 1, 0, 0, 0, 0]
    assert node.pin(["nowhere"], 1.0).outcomes.tolist() == [0]
    counted = node.counters()
    assert counted['p2pkv_pinned_pages_total{outcome="no_room"}'] == 4
    assert counted['p2pkv_pinned_pages_total{outcome="absent"}'] == 1
    assert first.release() == 6
    assert node.pin(KEYS[6:], 60.0).outcomes.all()


def test_a_pinned_page_can_be_taken_back(start: Callable[..., Node]) -> None:
    owner, other = start("owner"), start("other")
    published(owner)
    brought(other)
    with other.pin(KEYS, 60.0) as pin:
        assert pin.outcomes.all()
        owner.retract(KEYS)
        assert not any(found(other))


@pytest.mark.parametrize("ttl", [0, -1, 86401, False, "1"])
def test_a_ttl_that_is_none_is_refused(start: Callable[..., Node], ttl: object) -> None:
    node = start("node")
    with pytest.raises(UsageError, match="ttl must be above 0 and at most 86400 seconds, not"):
        node.pin(KEYS, ttl)  # type: ignore[arg-type]


def test_pages_are_handed_over(start: Callable[..., Node]) -> None:
    owner, other = start("owner"), start("other")
    published(owner)
    answer = owner.hand_over([*KEYS, "nowhere"], "other")
    assert (answer.n_accepted, answer.n_absent, answer.refusal) == (len(KEYS), 1, "")
    eventually(lambda: in_pool(other) == len(KEYS), 30.0)
    owner.close()
    assert all(found(other))


def test_a_hand_over_is_refused_with_the_reason(start: Callable[..., Node]) -> None:
    owner, other = start("owner"), start("other")
    start("stranger", namespace="another")
    start("bare", pool_size=0)
    published(owner)
    answer = owner.hand_over(KEYS, "stranger")
    assert answer.n_accepted == 0
    assert answer.refusal == "its pages are of another namespace, or of another epoch of it"
    assert owner.hand_over(KEYS, "bare").refusal == "it has no cache"
    assert owner.hand_over(KEYS, "nobody").refusal == "no other live node is called 'nobody'"
    with pytest.raises(UsageError, match="'owner' is this node itself"):
        owner.hand_over(KEYS, "owner")
    busy = [other.prefetch(fresh(1 << 17)) for _ in range(2)]
    assert owner.hand_over(KEYS, "other").refusal == "as many prefetches wait there as it takes"
    for prefetch in busy:
        prefetch.close()


def test_who_is_being_closed_refuses_a_hand_over_and_has_not_failed(
    start: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    owner, other = start("owner"), start("other")
    published(owner)
    assert other._parts.caching is not None
    other._parts.caching.prefetcher.stop()  # as the first that a close does
    assert owner.hand_over(KEYS, "other").refusal == "it is being closed"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_malformed_words_of_guests_change_nothing(start: Callable[..., Node]) -> None:
    owner, other = start("owner"), start("other")
    published(owner)
    brought(other)
    client = owner._parts.control.client
    for kind in (Kind.FOLLOW, Kind.TAKE_BACK):
        for body, count in ((b"", 0), (b"x" * 7, 1), (b"x" * 47, 5), (b"x" * 4096, 8192)):
            reply = client.ask(Request(other.address, kind, body, count=count), 30.0)
            assert reply is not None
            assert reply.status is ReplyStatus.MALFORMED
    for body in (b"", b"x" * 17, Namespace("default").prefix):
        reply = client.ask(Request(other.address, Kind.HAND_OVER, body), 30.0)
        assert reply is not None
        assert reply.status is ReplyStatus.REFUSED
    assert all(found(other))


def test_a_node_without_a_cache_has_no_pages_to_prefetch_or_pin(start: Callable[..., Node]) -> None:
    bare = start("bare", pool_size=0)
    for call in (lambda: bare.prefetch(KEYS), lambda: bare.pin(KEYS, 1.0), lambda: bare.hand_over(KEYS, "x")):
        with pytest.raises(UsageError, match="has no cache"):
            call()


def test_without_a_thread_to_be_had_pages_are_refused_and_the_next_prefetch_brings_them(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = start("owner"), start("reader")
    published(owner)
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", none_left)
        prefetch = reader.prefetch(KEYS)
        assert prefetch.done()
        assert set(prefetch.outcomes) == {PrefetchOutcome.REFUSED}
        # what it is to take over it says that it can't
        assert owner.drain(2.0).reason == "reader: it has no thread to bring pages with"
    assert brought(reader) == ALL_BROUGHT


def test_what_could_not_be_registered_once_is_tried_again(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = start("owner"), start("reader", pool_size=1024 * PAGE)
    published(owner)
    long = np.ones((1, 33 * PAGE), np.uint8)  # more than is read at a time as a rule
    with owner.register_memory(long):
        assert owner.publish(["long"], long).all()
    caching = reader._parts.caching
    assert caching is not None

    def fail(_: NDArray[np.uint8]) -> Memory:
        raise TransportError("cannot register memory: ENOMEM")

    caching.prefetcher._batch_nbytes = 16 * PAGE
    for keys in (KEYS[:6], ["long"], KEYS[6:]):
        with monkeypatch.context() as short:
            short.setattr(caching.prefetcher, "_register", fail)
            assert brought(reader, keys) in (
                [PrefetchOutcome.NOT_READ] * len(keys),
                [PrefetchOutcome.BROUGHT] * len(keys),
            )
        assert set(brought(reader, keys)) <= {PrefetchOutcome.BROUGHT, PrefetchOutcome.PRESENT}
