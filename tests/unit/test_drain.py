"""A node that drains leaves its pages to others. The hunt `drain` looks for what that could go wrong by."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

import pages
from can_encrypt import needs_libcrypto
from cluster import eventually
from p2pkv import ClosedError, Config, Drained, Node, UsageError
from p2pkv.cache.drained import pack_drain
from p2pkv.control.sockets import Request
from p2pkv.control.wire import LET_GO, TAKE_OVER, Kind, ReplyStatus
from p2pkv.page import HAS_DISK, Keys, Outcomes, Pieces
from p2pkv.testing.lateness import returns_within

PAGE = 4096
POOL = 64 * PAGE
KEYS = [f"k{i}" for i in range(40)]


@pytest.fixture
def start() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(node_id: str, **settings: object) -> Node:
        defaults = {"pool_size": POOL, "buffer_size": 0, "deadline": 5.0}
        join = [node.address for node in nodes][:1]
        nodes.append(Node.start(Config(node_id=node_id, join=join, **(defaults | settings))))  # type: ignore[arg-type]
        eventually(lambda: all(len(node.members()) == len(nodes) for node in nodes), 30.0)
        return nodes[-1]

    yield start
    for node in reversed(nodes):
        node.close()


def published(node: Node, keys: list[str] = KEYS, nbytes: int = PAGE) -> int:
    memory = np.zeros((len(keys), nbytes), np.uint8)
    pages.fill(memory, keys)
    with node.register_memory(memory):
        return sum(
            int(node.publish(keys[i : i + 8], memory[i : i + 8]).sum()) for i in range(0, len(keys), 8)
        )


def found(node: Node, keys: list[str] = KEYS) -> int:
    """Say how many pages a node finds; a wrong byte is an error."""
    memory = np.zeros((len(keys), PAGE), np.uint8)
    with node.register_memory(memory):
        hits = node.fetch(keys, memory)
    assert pages.wrong(memory, keys, hits) == []
    return int(hits.sum())


def in_pool(node: Node, keys: list[str] = KEYS) -> list[bool]:
    caching = node._parts.caching
    assert caching is not None
    there, _ = caching.pool.lookup(caching.cache.hash(keys)[1])
    return [bool(one) for one in there]


def left(drained: Drained) -> int:
    return drained.n_pages - drained.n_handed_over


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


def test_those_used_last_go_first_and_replace_one_part_of_each_pool(start: Callable[..., Node]) -> None:
    nodes = [start(f"n{i}") for i in range(3)]
    own = [[f"{node.node_id} {i}" for i in range(64)] for node in nodes]
    for node, keys in zip(nodes, own, strict=True):
        assert published(node, keys) == 64  # all pools are full
    assert found(nodes[0], own[0][:30]) == 30  # used last, and in this order
    drained = nodes[0].drain(10.0)
    # two pools give one part of three each: 21 pages
    assert drained.receivers == {"n1": 21, "n2": 21}
    assert (left(drained), drained.reason) == (22, "the others have no room for more")
    eventually(lambda: found(nodes[1], own[0][:30]) == 30, 10.0)
    taken = [any(where) for where in zip(in_pool(nodes[1], own[0]), in_pool(nodes[2], own[0]), strict=True)]
    assert taken[:30] == [True] * 30
    for node, keys in zip(nodes[1:], own[1:], strict=True):
        stayed = in_pool(node, keys)
        assert stayed.count(False) == 21
        assert all(stayed[24:])  # of three batches that were published first
    counted = nodes[0].counters()
    outcomes = ("handed_over", "left", "gone")
    assert [counted[f'p2pkv_drained_pages_total{{outcome="{one}"}}'] for one in outcomes] == [42, 22, 0]


def test_free_room_comes_first(start: Callable[..., Node]) -> None:
    node, full, empty = start("node"), start("full"), start("empty")
    theirs = [f"full {i}" for i in range(64)]
    published(full, theirs)
    published(node)
    assert node.drain(10.0).receivers == {"empty": len(KEYS)}
    assert all(in_pool(full, theirs))
    assert found(empty) == len(KEYS)


def test_a_page_that_a_node_has_no_room_for_does_not_keep_it_from_shorter_ones(
    start: Callable[..., Node],
) -> None:
    node, small = start("node"), start("small", pool_size=16 * PAGE)
    keys = KEYS[:12]
    assert published(node, keys) == len(keys)
    assert published(node, ["long one", "long two"], nbytes=20 * PAGE) == 2  # used last
    large = start("large", pool_size=20 * PAGE)
    theirs = [f"large {i}" for i in range(20)]
    assert published(large, theirs) == 20  # whose place pages may take, but not so long ones
    drained = node.drain(10.0)
    assert drained.receivers == {"small": len(keys)}
    assert (left(drained), drained.reason) == (2, "the others have no room for more")
    assert all(in_pool(small, keys))
    assert all(in_pool(large, theirs))


def test_pages_are_counted_as_the_room_that_they_take(start: Callable[..., Node]) -> None:
    node, other = start("node"), start("other", pool_size=16 * PAGE)
    mixed = [*(f"short {i}" for i in range(8)), *(f"long {i}" for i in range(8))]
    assert published(node, mixed[8:], nbytes=3 * PAGE + 8) == 8
    assert published(node, mixed[:8], nbytes=8) == 8
    drained = node.drain(10.0)
    # 8 blocks for the short ones, which were used last, and the rest for two of the others
    assert (drained.receivers, sum(in_pool(other, mixed))) == ({"other": 10}, 10)


def test_pages_of_a_leaver_do_not_take_each_others_place(start: Callable[..., Node]) -> None:
    """Those that were used last would go for those that were used first, and both would count as handed over."""
    node, other = start("node"), start("other", pool_size=16 * PAGE)
    theirs = [f"other {i}" for i in range(4)]
    assert published(other, theirs) == len(theirs)
    assert published(node) == len(KEYS)
    drained = node.drain(10.0)
    assert (drained.n_handed_over, drained.n_adopted) == (16, 16)
    assert in_pool(other) == [False] * 24 + [True] * 16
    assert not any(in_pool(other, theirs))


def test_what_a_leaver_used_last_goes_last_where_it_is_taken_over(start: Callable[..., Node]) -> None:
    node, other = start("node"), start("other")
    assert sum(published(node, [key]) for key in KEYS) == len(KEYS)
    assert node.drain(10.0).receivers == {"other": len(KEYS)}
    fresh = [f"fresh {i}" for i in range(40)]
    assert published(other, fresh) == len(fresh)
    assert in_pool(other) == [False] * 16 + [True] * 24


def test_who_lets_go_meanwhile_costs_another_leaver_no_order(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv.cache.drain_work._BATCH", 4)
    node, earlier, other = start("node"), start("earlier", pool_size=16 * PAGE), start("other")
    assert sum(published(node, [key]) for key in KEYS) == len(KEYS)
    assert published(earlier, [f"earlier {i}" for i in range(16)]) == 16
    caching = node._parts.caching
    assert caching is not None
    drainer = caching.drainer
    offer, n_offered = drainer._offer, iter(range(1000))

    def offer_beside(*arguments: object, **options: object) -> NDArray[np.uint8]:
        if next(n_offered) == 2:
            assert earlier.drain(10.0).receivers == {"other": 16}
        return offer(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(drainer, "_offer", offer_beside)
    assert node.drain(20.0).receivers == {"other": len(KEYS)}
    fresh = [f"fresh {i}" for i in range(40)]
    assert published(other, fresh) == len(fresh)
    assert in_pool(other).count(True) == len(KEYS) - 16
    assert all(in_pool(other)[-8:]), "those that had come by then were used last"


def test_who_becomes_known_meanwhile_takes_what_the_others_have_no_room_for(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, small, late = start("node"), start("small", pool_size=POOL // 4), start("late")
    published(node)
    theirs = [f"small {i}" for i in range(8)]
    published(small, theirs)
    caching = node._parts.caching
    assert caching is not None
    drainer = caching.drainer
    everybody = drainer._members
    asked_by_turns = iter([{key: m for key, m in everybody().items() if m.node_id == "small"}])
    monkeypatch.setattr(drainer, "_members", lambda: next(asked_by_turns, everybody()))
    assert node.drain(10.0).receivers == {"small": 8, "late": 32}
    assert all(in_pool(small, theirs))
    assert found(late) == len(KEYS)


@pytest.mark.parametrize("is_alone", [True, False])
def test_who_is_being_restarted_is_waited_for_before_others_lose_pages(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    monkeypatch.setattr("p2pkv.cache.drain._RETURN_S", 60.0)
    node, restarted = start("node"), start("restarted")
    theirs = [f"small {i}" for i in range(16)]
    if not is_alone:
        small = start("small", pool_size=POOL // 4)
        published(small, theirs)
    published(node)
    restarted.drain(5.0)
    restarted.close()
    eventually(lambda: "restarted" not in {m.node_id for m in node.members()}, 30.0)
    caching = node._parts.caching
    assert caching is not None
    waits, waiting = caching._departures.wait, threading.Event()

    def wait(until: float) -> None:
        waiting.set()
        waits(until)

    monkeypatch.setattr(caching._departures, "wait", wait)
    node.begin_drain(600.0)
    assert waiting.wait(30.0)
    again = Node.start(
        Config(node_id="restarted", join=[node.address], pool_size=POOL, buffer_size=0, deadline=5.0)
    )
    eventually(lambda: node.drained is not None, 30.0)
    assert node.drained is not None
    assert node.drained.receivers == {"restarted": len(KEYS)}
    assert is_alone or all(in_pool(small, theirs))
    again.close()


def test_a_node_is_closed_while_its_drain_waits_for_who_may_come_back(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv.cache.drain._RETURN_S", 60.0)
    node, gone = start("node"), start("gone")
    published(node)
    gone.close()
    eventually(lambda: len(node.members()) == 1, 30.0)
    caching = node._parts.caching
    assert caching is not None
    waits, waiting = caching._departures.wait, threading.Event()

    def wait(until: float) -> None:
        waiting.set()
        waits(until)

    monkeypatch.setattr(caching._departures, "wait", wait)
    node.begin_drain(600.0)
    assert waiting.wait(30.0)
    closing = threading.Thread(target=node.close, daemon=True)
    closing.start()
    closing.join(30.0)
    assert not closing.is_alive()


def test_who_does_not_come_back_costs_a_part_of_the_time(start: Callable[..., Node]) -> None:
    node, other, gone = start("node"), start("other", pool_size=POOL // 4), start("gone")
    published(node)
    gone.close()
    eventually(lambda: len(node.members()) == 2, 30.0)
    with returns_within(2.0):
        drained = node.drain(1.0)
    assert drained.receivers == {"other": 16}
    assert drained.seconds >= 0.1
    assert other.counters()["p2pkv_adopted_pages_total"] == 16


@pytest.mark.parametrize("is_alone", [True, False])
def test_who_answers_late_is_asked_again(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    """One thread of the interpreter answers, which an engine may hold for longer than a question waits."""
    monkeypatch.setattr("p2pkv.cache.drain._ASK_S", 0.5)
    node, held = start("node"), start("held")
    if not is_alone:
        full = start("full", pool_size=16 * PAGE)
        published(full, [f"full {i}" for i in range(16)])
    published(node)
    caching, others = node._parts.caching, held._parts.caching
    assert caching is not None
    assert others is not None
    may_answer, pool = threading.Event(), others.pool
    stats, unasked, n_asked = pool.stats, caching.drainer._unasked, iter(range(1000))

    def waits() -> dict[str, int]:
        if threading.current_thread().name == "p2pkv-take_over":
            assert may_answer.wait(30.0)
        return stats()

    def asked_again(*arguments: object) -> object:
        if next(n_asked) == 2:
            may_answer.set()
        return unasked(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pool, "stats", waits)
    monkeypatch.setattr(caching.drainer, "_unasked", asked_again)
    drained = node.drain(20.0)
    may_answer.set()
    assert (drained.receivers.get("held"), left(drained)) == (len(KEYS) - drained.receivers.get("full", 0), 0)


def unable_to_read(node: Node, monkeypatch: pytest.MonkeyPatch, keys: list[str] | None = None) -> None:
    """Have a node read none of these pages, or nothing at all: a firewall lets questions through and no pages, say."""
    caching = node._parts.caching
    assert caching is not None
    read, hidden = (
        caching.prefetcher._read,
        None if keys is None else {bytes(one) for one in caching.cache.hash(keys)[1]},
    )

    def reads_nothing(ids: Keys, pieces: Pieces, raw: NDArray[np.uint8], deadline: float) -> Outcomes:
        outcomes = read(ids, pieces, raw, deadline)
        outcomes[[hidden is None or bytes(one) in hidden for one in ids]] = 0
        return outcomes

    monkeypatch.setattr(caching.prefetcher, "_read", reads_nothing)


@pytest.mark.parametrize("n_pages", [8, 60])
def test_what_a_node_can_not_read_others_take(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, n_pages: int
) -> None:
    monkeypatch.setattr("p2pkv.cache.drain_work._BATCH", 8)
    node, barred, other = start("node"), start("barred", pool_size=4 * POOL), start("other")
    keys = [f"page {i}" for i in range(n_pages)]
    published(node, keys)
    unable_to_read(barred, monkeypatch)
    drained = node.drain(10.0)
    assert (drained.receivers, left(drained), drained.reason) == ({"other": n_pages}, 0, "")
    assert all(in_pool(other, keys))


def test_what_nobody_can_read_is_left_and_costs_no_other_page(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv.cache.drain_work._BATCH", 1)
    node, *others = (start(node_id) for node_id in ("node", "one", "two"))
    published(node)
    for other in others:
        unable_to_read(other, monkeypatch, KEYS[-1:])  # which is offered first
    drained = node.drain(10.0)
    assert (drained.n_handed_over, left(drained)) == (len(KEYS) - 1, 1)
    assert "it could not read what it was to take over" in drained.reason
    counted = node.counters()
    outcomes = ("handed_over", "left", "gone")
    assert [counted[f'p2pkv_drained_pages_total{{outcome="{one}"}}'] for one in outcomes] == [
        len(KEYS) - 1,
        1,
        0,
    ]


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
