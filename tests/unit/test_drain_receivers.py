"""Who takes the pages of a node that drains over, which of them, in what order, and what of those who can't."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster import eventually
from drains import KEYS, PAGE, POOL, found, in_pool, left, published, starting
from p2pkv import Config, Node
from p2pkv.cache.drain_receiver import Receiver
from p2pkv.cache.prefetch import PrefetchOutcome
from p2pkv.directory.view import node_key
from p2pkv.page import Keys, Outcomes, Pieces
from p2pkv.testing.lateness import returns_within


@pytest.fixture
def start() -> Iterator[Callable[..., Node]]:
    with starting() as start:
        yield start


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


def test_who_can_not_read_what_another_one_could_not_costs_no_drain_its_end(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives its own back, too, once it has read nothing three times; nothing is left to hand out for it then."""
    monkeypatch.setattr("p2pkv.cache.drain_work._BATCH", 1)
    node, *others = (start(node_id) for node_id in ("node", "one", "two"))
    published(node)
    caching = node._parts.caching
    assert caching is not None
    drainer, uses = caching.drainer, caching.drainer._hottest()
    receivers = [Receiver(caching.members()[node_key(one.node_id)], free=POOL) for one in others]
    receivers[0].unread, receivers[1].unread = [uses[:5]], [uses[5:6]]

    def reads_nothing(_: Receiver, offered: NDArray[np.void], *__: float, **___: bool) -> NDArray[np.uint8]:
        return np.full(len(offered), PrefetchOutcome.NOT_READ, np.uint8)

    monkeypatch.setattr(drainer, "_offer", reads_nothing)
    drainer._hand_out_unread(receivers, time.monotonic() + 30.0)
    assert [one.refusal for one in receivers] == ["it could not read what it was to take over"] * 2
