"""A node that drains leaves its pages to others. The hunt `drain` looks for what that could go wrong by."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from can_encrypt import needs_libcrypto
from cluster import eventually
from drains import KEYS, POOL, found, in_pool, left, published, starting
from p2pkv import ClosedError, Node, UsageError
from p2pkv.cache.drained import pack_drain
from p2pkv.control.sockets import Request
from p2pkv.control.wire import LET_GO, TAKE_OVER, Kind, ReplyStatus
from p2pkv.page import HAS_DISK
from p2pkv.testing.lateness import returns_within


@pytest.fixture
def start() -> Iterator[Callable[..., Node]]:
    with starting() as start:
        yield start


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"transports": ["tcp"], "encrypt": "tcp"}, marks=needs_libcrypto)],
    ids=["plain", "encrypted"],
)
def test_its_pages_are_others_own_and_outlive_it_and_them(
    start: Callable[..., Node], settings: dict[str, object]
) -> None:
    first, second, third = (start(node_id, **settings) for node_id in ("first", "second", "third"))
    assert published(first) == len(KEYS)
    drained = first.drain(10.0)
    assert (drained.n_handed_over, drained.n_adopted, drained.reason) == (len(KEYS), len(KEYS), "")
    assert sum(drained.receivers.values()) == len(KEYS)
    assert first.drain(10.0) == drained == first.drained
    assert found(second) == found(third) == len(KEYS)  # it still is there, and read from
    first.close()
    eventually(lambda: len(second.members()) == 2, 30.0)
    assert found(second) == found(third) == len(KEYS)
    assert second.counters()["p2pkv_guest_pages"] == third.counters()["p2pkv_guest_pages"] == 0
    # what was taken over is handed on like any other page
    again = second.drain(10.0)
    assert left(again) == 0
    second.close()
    eventually(lambda: len(third.members()) == 1, 30.0)
    assert found(third) == len(KEYS)


def test_it_stores_nothing_new_and_says_so(start: Callable[..., Node]) -> None:
    node, other = start("node", metrics_port=0), start("other")
    published(node, KEYS[:4])
    node.drain(5.0)
    assert published(node, KEYS[4:8]) == 0
    assert in_pool(node, KEYS[:8]) == [True] * 4 + [False] * 4
    assert node.counters()['p2pkv_unpublished_pages_total{reason="draining"}'] == 4
    assert node.counters()["p2pkv_draining"] == 1
    assert "is draining" in (node._parts.not_ready() or "")
    eventually(lambda: [m.condition for m in other.members()] == ["DRAINING", "ALIVE"], 10.0)
    assert node.counters()["p2pkv_ring_share_ratio"] == 0
    assert published(other, KEYS[4:8]) == 4


def test_what_others_have_is_not_put_again(start: Callable[..., Node]) -> None:
    node, other = start("node"), start("other")
    published(node)
    node.drain(10.0)
    caching = node._parts.caching
    assert caching is not None
    announcer = caching.announcer
    before = node.counters()["p2pkv_reannounced_pages_total"]
    announcer.owe_everything()
    announcer.step()
    assert node.counters()["p2pkv_reannounced_pages_total"] == before
    assert found(other) == len(KEYS)


def test_what_is_taken_back_before_it_lets_go_is_gone_and_nothing_is_after(
    start: Callable[..., Node],
) -> None:
    node, other = start("node"), start("other")
    published(node)
    assert node._parts.caching is not None
    assert other.prefetch(KEYS[:10]).wait(30.0)
    node.retract(KEYS[:5])
    node.drain(5.0)
    assert found(other) == len(KEYS) - 5
    for take_back in (lambda: node.retract(KEYS), node.clear):
        with pytest.raises(ClosedError, match="has handed its pages over"):
            take_back()
    assert found(other) == len(KEYS) - 5
    assert other.retract(KEYS).sum() == len(KEYS) - 5  # they are its own
    node.close()
    eventually(lambda: len(other.members()) == 1, 30.0)
    assert found(other) == 0


def test_who_missed_a_retraction_adopts_nothing(start: Callable[..., Node]) -> None:
    node, other = start("node"), start("other")
    published(node)
    assert other.prefetch(KEYS).wait(30.0)
    parts = node._parts.caching
    assert parts is not None
    parts.guests.count_taken_back()  # of which nobody is told
    assert parts.followers.let_go(1e9) == 0
    assert sum(in_pool(other)) == 0


def test_a_bump_ends_what_was_adopted(start: Callable[..., Node]) -> None:
    node, other = start("node"), start("other")
    published(node)
    node.drain(5.0)
    assert sum(in_pool(other)) == len(KEYS)
    other.bump()
    assert sum(in_pool(other)) == 0


def test_what_is_adopted_goes_to_its_holders_disk(start: Callable[..., Node], tmp_path: object) -> None:
    node = start("node")
    other = start("other", disk_size="8MiB", disk_path=f"{tmp_path}/disk")
    published(node)
    node.drain(5.0)
    caching = other._parts.caching
    assert caching is not None
    assert caching.tier is not None
    assert caching.tier.flush(30.0)
    ids = caching.cache.hash(KEYS)[1]
    eventually(lambda: bool(caching.tier.contains(ids).all()), 30.0)
    assert (caching.pool.lookup(ids)[1]["flags"] & HAS_DISK).all()


def test_nobody_takes_over_who_leaves_or_has_another_namespace(start: Callable[..., Node]) -> None:
    node, other, foreign = start("node"), start("other"), start("foreign", namespace="of others")
    published(node)
    other.drain(0.0)
    drained = node.drain(5.0)
    assert drained.n_handed_over == 0
    assert "foreign: its pages are of another namespace" in drained.reason
    assert found(other) == len(KEYS)
    assert sum(in_pool(foreign)) == 0


def test_a_leaver_is_read_from_for_a_moment_but_not_what_is_others(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv.parts.node._LINGER_S", 3.0)
    node, other = start("node"), start("other")
    published(other)
    own = ["own 1", "own 2"]
    published(node, own)
    theirs = KEYS[:20]
    assert node.prefetch(theirs).wait(30.0)
    node.drain(5.0)
    assert sum(in_pool(node, [*theirs, *own])) == len(theirs) + 2
    closing = threading.Thread(target=node.close)
    closing.start()
    eventually(lambda: len(other.members()) == 1, 30.0)
    assert sum(in_pool(node, own)) == 2  # whoever has not heard yet reads these
    assert sum(in_pool(node, theirs)) == 0  # and nobody tells it any more what is taken back of those
    closing.join()
    assert found(other, [*KEYS, *own]) == len(KEYS) + 2


def test_alone_or_without_time_it_hands_nothing_over(start: Callable[..., Node]) -> None:
    node = start("node")
    published(node)
    assert node.drain(5.0).reason == "no other node that could take them answers"
    assert found(node) == len(KEYS)  # though nobody holds the directory any more
    assert not node.exists(["nothing"]).any()
    other = start("other")
    published(other, KEYS[:3])
    assert other.drain(0.0).n_handed_over == 0
    with pytest.raises(UsageError, match="seconds must be"):
        node.drain(-1.0)


def test_what_one_took_who_falls_silent_goes_to_others(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv.cache.drain_work._BATCH", 8)
    monkeypatch.setattr("p2pkv.cache.drain._ANSWER_S", 1.0)
    node, silent, other = start("node"), start("silent"), start("other", pool_size=2 * POOL)
    published(node)
    parts, others = silent._parts.caching, other._parts.caching
    assert parts is not None
    assert others is not None
    take_over, take_over_there = parts.prefetcher.take_over, others.prefetcher.take_over
    has_some, may_go_on = threading.Event(), threading.Event()

    def takes_once(*arguments: object) -> object:
        if has_some.is_set():
            may_go_on.wait(30.0)
        has_some.set()
        return take_over(*arguments)  # type: ignore[arg-type]

    def takes_later(*arguments: object) -> object:
        assert has_some.wait(30.0)
        return take_over_there(*arguments)  # type: ignore[arg-type]

    parts.prefetcher.take_over = takes_once  # type: ignore[assignment]
    others.prefetcher.take_over = takes_later  # type: ignore[assignment]
    drained = node.drain(20.0)
    may_go_on.set()
    assert drained.receivers == {"other": len(KEYS)}
    assert all(in_pool(other))


def held_by(node: Node) -> tuple[threading.Event, threading.Event]:
    """Have a prefetch of this node, for which whoever hands pages over to it waits, not end by itself.

    Returns what is set once one is held, and what lets it go on.
    """
    parts = node._parts.caching
    assert parts is not None
    is_held, may_go_on = threading.Event(), threading.Event()
    read = parts.prefetcher._read

    def held(*arguments: object) -> object:
        is_held.set()
        assert may_go_on.wait(40.0)
        return read(*arguments)  # type: ignore[arg-type]

    parts.prefetcher._read = held  # type: ignore[assignment]
    return is_held, may_go_on


def test_closing_ends_a_drain(start: Callable[..., Node]) -> None:
    node, other = start("node"), start("other")
    published(node)
    is_held, may_go_on = held_by(other)
    node.begin_drain(60.0)
    assert is_held.wait(30.0)
    node.close()
    may_go_on.set()
    assert node.drained is None


def test_who_drains_meanwhile_waits_no_longer_than_he_said(start: Callable[..., Node]) -> None:
    node, other = start("node"), start("other")
    published(node)
    is_held, may_go_on = held_by(other)
    node.begin_drain(50.0)
    assert is_held.wait(30.0)
    with returns_within(0.2 + 0.1):
        reason = node.drain(0.2).reason
    assert reason == "a drain that was begun before is not done yet"
    assert node.drained is None
    may_go_on.set()
    assert node.drain(50.0) == node.drained


def test_who_asks_wrongly_is_refused(start: Callable[..., Node]) -> None:
    node, other = start("node"), start("other")
    client = node._parts.control.client
    caching = node._parts.caching
    assert caching is not None

    def ask(kind: Kind, body: bytes) -> ReplyStatus:
        reply = client.ask(Request(other.address, kind, body), 10.0)
        assert reply is not None
        return reply.status

    header = TAKE_OVER.pack(caching.cache.namespace.prefix, 1, 2, 1000, 1)
    assert ask(Kind.TAKE_OVER, header + bytes(81)) is ReplyStatus.MALFORMED
    assert ask(Kind.TAKE_OVER, header + 2 * bytes(80)) is ReplyStatus.MALFORMED  # one page twice
    assert ask(Kind.TAKE_OVER, header + bytes(80 * 1000)) is ReplyStatus.MALFORMED
    assert ask(Kind.TAKE_OVER, bytes(len(header))) is ReplyStatus.REFUSED
    assert ask(Kind.TAKE_OVER, header + bytes(80)) is ReplyStatus.OK  # of a node that is none
    assert ask(Kind.LET_GO, b"") is ReplyStatus.MALFORMED
    assert ask(Kind.LET_GO, LET_GO.pack(1, 2, 3)) is ReplyStatus.OK
    assert ask(Kind.DRAIN, b"") is ReplyStatus.MALFORMED
    assert other.counters()["p2pkv_draining"] == 0
    assert ask(Kind.DRAIN, pack_drain(1.0)) is ReplyStatus.OK
    eventually(lambda: other.drained is not None, 10.0)


def test_without_a_thread_to_be_had_a_drain_begins_when_it_is_asked_for_again(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    node, other, third = start("node"), start("other"), start("third")
    published(node)
    for one in (other, third):
        one.prefetch(KEYS[:1]).wait(30.0)  # they have the threads that they need
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError):
            node.begin_drain(10.0)
        assert node.draining_within is None
        assert published(node, ["one more"]) == 1
        assert left(node.drain(10.0)) == 0  # in the caller's thread
    other.begin_drain(10.0)
    eventually(lambda: other.drained is not None, 30.0)


def test_a_start_without_a_thread_for_the_last_question_leaves_none_behind(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "p2pkv-let_go":
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            start("node")
    assert "p2pkv-take_over" not in {thread.name for thread in threading.enumerate()}
