"""What a node has and the directory does not know is told again: nothing that is owed is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from p2pkv.control.wire import Kind
from p2pkv.directory.announcer import CHECK_S
from p2pkv.directory.listing import Listing
from p2pkv.directory.owed import MOST_KEYS
from p2pkv.directory.view import State, View
from p2pkv.page import Keys
from simulated_directory_nodes import DirectoryNode, DirectoryNodes

N = 300


def n_mended(node: DirectoryNode) -> float:
    return node.metrics.counters()["p2pkv_mended_entries_total"]


@pytest.fixture
def start() -> Iterator[Callable[..., DirectoryNodes]]:
    started: list[DirectoryNodes] = []

    def start(*node_ids: str, **options: int) -> DirectoryNodes:
        started.append(DirectoryNodes(*node_ids, **options))
        return started[-1]

    yield start
    for nodes in started:
        nodes.close()


def test_what_moved_to_a_newcomer_is_put_there(start: Callable[..., DirectoryNodes]) -> None:
    nodes = start("a", "b", "c")
    nodes.set_view("a", "b")
    keys = nodes.nodes["a"].publish(N)
    nodes.set_view("a", "b", "c")
    nodes.run(1.0)
    moved = int((nodes.nodes["c"].directory.ring.owners(keys) == 2).any(axis=1).sum())
    assert moved > N // 4
    assert int(nodes.nodes["c"].shard.get(keys)[0].sum()) == moved


def test_what_moved_is_put_in_few_requests_though_it_is_little_of_all(
    start: Callable[..., DirectoryNodes],
) -> None:
    ids = [f"n{i:02}" for i in range(17)]
    nodes = start(*ids, page_nbytes=64)
    nodes.set_view(*ids[:-1])
    first, newcomer = nodes.nodes[ids[0]], nodes.nodes[ids[-1]]
    keys = np.concatenate([first.publish(1024) for _ in range(8)])
    nodes.run(10.0)
    before = first.control.n_requests
    nodes.set_view(*ids)
    nodes.run(1.0)
    is_its = (first.directory.ring.owners(keys) == ids.index(newcomer.member.node_id)).any(axis=1)
    assert int(newcomer.shard.get(keys)[0].sum()) == int(is_its.sum()) > 512
    assert first.control.n_requests - before < 3 * len(ids)  # in batches of all pages it would be 8 of each


def test_what_is_taken_back_while_newcomers_settle_is_found_nowhere(
    start: Callable[..., DirectoryNodes],
) -> None:
    nodes = start("a", "b", "c", "d")
    nodes.set_view("a", "b")
    a = nodes.nodes["a"]
    keys = a.publish(N)
    nodes.run(10.0)  # what was put just now is never doubted
    nodes.set_view("a", "b", "c", "d")
    nodes.run(1.0)
    for node in nodes.nodes.values():
        node.directory.confirm_view()
    there, locations = a.pool.retract(keys)
    assert there.all()
    a.directory.drop(keys, locations, a.clock.now + 1.0, by_owner=True)
    for node in nodes.nodes.values():
        assert node.n_found(keys) == 0


def test_what_newcomers_have_not_been_told_yet_is_found_where_it_was(
    start: Callable[..., DirectoryNodes],
) -> None:
    nodes = start("a", "b", "c", "d")
    nodes.set_view("a", "b")
    keys = nodes.nodes["a"].publish(N)
    nodes.run(10.0)  # what was put just now is never doubted
    nodes.set_view("a", "b", "c", "d")
    for node in nodes.nodes.values():
        node.directory.confirm_view()
    for node in nodes.nodes.values():
        assert node.n_found(keys) == N


@pytest.mark.parametrize("stayer", ["a", "k"])
def test_what_ten_have_is_found_at_the_one_that_keeps_it(
    start: Callable[..., DirectoryNodes], stayer: str
) -> None:
    nodes = start(*"abcdefghijkl")
    keys = nodes.nodes["a"].publish(N)
    for node_id in "bcdefghijk":
        nodes.nodes[node_id].publish_keys(keys)
    nodes.run(2.0)
    for node_id in set("abcdefghijk") - {stayer}:
        node = nodes.nodes[node_id]
        _, locations = node.pool.retract(keys)
        node.directory.drop(keys, locations, node.clock.now + 1.0, by_owner=True)
        nodes.run(2.0)
        assert nodes.nodes["l"].n_found(keys) == N


def test_what_was_put_by_a_ring_that_did_not_last_is_put_by_the_one_after(
    start: Callable[..., DirectoryNodes],
) -> None:
    nodes = start("a", "b", "c", "d")
    nodes.set_view("a", "b")
    keys = nodes.nodes["a"].publish(N)
    nodes.set_view("a", "b", "c", "d")  # as before, before anybody has looked
    nodes.run(1.0)
    for index, node_id in enumerate("abcd"):
        owned = (nodes.nodes["a"].directory.ring.owners(keys) == index).any(axis=1)
        assert nodes.nodes[node_id].shard.get(keys)[0][owned].all()


def test_who_fell_silent_puts_nothing_whatever_moves_or_is_missed(
    start: Callable[..., DirectoryNodes],
) -> None:
    nodes = start("a", "b", "c")
    nodes.set_view("a", "b")
    a, b, c = nodes.nodes.values()
    keys = a.publish(N)
    a.announcer.fall_silent(a.clock.now + 1.0)
    b.lose_shard()
    a.announcer.owe("b", keys)
    nodes.set_view("a", "b", "c")
    nodes.run(5.0)
    assert b.shard.get(keys)[0].sum() == c.shard.get(keys)[0].sum() == 0


def test_falling_silent_waits_for_what_is_being_put(
    start: Callable[..., DirectoryNodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = start("a", "b")
    a = nodes.nodes["a"]
    a.publish(N)
    order: list[str] = []
    has_begun, may_end = threading.Event(), threading.Event()

    def put(*_: object, **__: object) -> object:
        has_begun.set()
        assert may_end.wait(60.0)
        order.append("put")
        return None

    def fall_silent() -> None:
        a.announcer.fall_silent(a.clock.now + 60.0)
        order.append("silent")

    monkeypatch.setattr(a.directory, "put", put)
    a.announcer.owe_everything()
    threads = [threading.Thread(target=a.announcer.step), threading.Thread(target=fall_silent)]
    threads[0].start()
    assert has_begun.wait(60.0)
    threads[1].start()
    threads[1].join(0.2)
    may_end.set()
    for thread in threads:
        thread.join()
    assert order == ["put", "silent"]


@pytest.mark.parametrize("n_places", [64, 4096])
def test_that_all_is_announced_does_not_wait_for_an_owner_without_room_for_ever(
    start: Callable[..., DirectoryNodes], n_places: int
) -> None:
    nodes = start("a", "b", "c")
    a, b = nodes.nodes["a"], nodes.nodes["b"]
    a.publish(N)
    b.lose_shard(n_places)
    said: list[float] = []
    a.announcer.on_announced = lambda: said.append(nodes.now)
    began = nodes.now
    a.announcer.owe_everything()
    nodes.run(CHECK_S / 2)
    assert len(said) == (n_places > N)
    nodes.run(CHECK_S)
    assert len(said) == 1
    assert said[0] < began + CHECK_S + 60.0


def test_a_failure_amid_telling_everything_forgets_nothing(
    start: Callable[..., DirectoryNodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = start("a", "b")
    a, b = nodes.nodes.values()
    keys = a.publish(N)
    b.lose_shard()
    a.announcer.owe_everything()
    batch = Listing.batch

    def fail_once(self: Listing, limit: int) -> object:
        monkeypatch.setattr(Listing, "batch", batch)
        raise MemoryError("once")

    monkeypatch.setattr(Listing, "batch", fail_once)
    with pytest.raises(MemoryError):
        a.announcer.step()
    nodes.run(3.0)
    assert b.shard.get(keys)[0].all()


def test_what_a_reader_took_out_though_it_is_there_is_found_again_soon(
    start: Callable[..., DirectoryNodes],
) -> None:
    nodes = start("a", "b", "c", "reader")
    a, reader = nodes.nodes["a"], nodes.nodes["reader"]
    keys = a.publish(N)
    _, locations = a.pool.lookup(keys)
    reader.directory.drop(keys, locations, reader.clock.now + 1.0, by_owner=False)
    assert reader.n_found(keys) == 0
    nodes.run(2.0)
    assert reader.n_found(keys) == N


def test_what_is_gone_stays_gone_when_a_reader_says_so(start: Callable[..., DirectoryNodes]) -> None:
    nodes = start("a", "b", "reader")
    a, reader = nodes.nodes["a"], nodes.nodes["reader"]
    keys = a.publish(N)
    found, locations = a.pool.retract(keys)
    assert found.all()
    reader.directory.drop(keys, locations, reader.clock.now + 1.0, by_owner=False)
    nodes.run(2.0)
    assert reader.n_found(keys) == 0
    assert n_mended(a) == 0


def test_what_a_shard_lost_without_a_word_is_put_back_by_the_slow_comparison(
    start: Callable[..., DirectoryNodes],
) -> None:
    nodes = start("a", "b", "c")
    a, b = nodes.nodes["a"], nodes.nodes["b"]
    keys = a.publish(900)
    known = b.shard.get(keys)[0]
    b.lose_shard()
    nodes.run(2 * 600.0)
    assert (b.shard.get(keys)[0] == known).all()
    assert n_mended(a) == known.sum()


def test_comparing_costs_little_when_nothing_is_lost(start: Callable[..., DirectoryNodes]) -> None:
    nodes = start("a", "b", "c")
    a = nodes.nodes["a"]
    a.publish(500)
    before = a.control.n_records[Kind.PUT]
    nodes.run(6 * 600.0)
    assert a.control.n_records[Kind.PUT] == before
    assert 500 < a.control.n_records[Kind.CHECK] < 2 * 500 * 8


def test_an_owner_that_missed_a_few_entries_is_given_these_and_no_others(
    start: Callable[..., DirectoryNodes],
) -> None:
    nodes = start("a", "b", "c")
    a, b = nodes.nodes["a"], nodes.nodes["b"]
    a.publish(800)
    b.is_stopped = True
    missed = a.publish(20)
    b.is_stopped = False
    before, compared = a.control.n_records[Kind.PUT], a.control.n_records[Kind.CHECK]
    nodes.run(3.0)
    owned = int((a.directory.ring.owners(missed) == 1).any(axis=1).sum())
    assert int(b.shard.get(missed)[0].sum()) == owned
    assert a.control.n_records[Kind.PUT] - before == owned
    assert a.control.n_records[Kind.CHECK] - compared <= 2 * len(missed)


def purged_unheard(
    start: Callable[..., DirectoryNodes],
) -> tuple[DirectoryNodes, DirectoryNode, DirectoryNode, Keys]:
    """Have node a lose all its pages while b, which owns entries of them, is stopped; b is back then."""
    nodes = start("a", "b")
    a, b = nodes.nodes["a"], nodes.nodes["b"]
    keys = a.publish(N)
    b.is_stopped = True
    a.pool.purge()
    nodes.run(1.0)
    b.is_stopped = False
    return nodes, a, b, keys


def test_what_an_owner_was_not_told_is_gone_is_taken_out_there_later(
    start: Callable[..., DirectoryNodes],
) -> None:
    nodes, _, b, keys = purged_unheard(start)
    assert b.shard.get(keys)[0].all()
    nodes.run(5.0)
    assert not b.shard.get(keys)[0].any()


def test_what_is_published_again_is_not_taken_out_by_what_was_not_told(
    start: Callable[..., DirectoryNodes],
) -> None:
    nodes, a, b, keys = purged_unheard(start)
    a.publish_keys(keys)
    nodes.run(5.0)
    assert b.shard.get(keys)[0].all()


def test_what_was_answered_late_is_not_put_again(start: Callable[..., DirectoryNodes]) -> None:
    nodes = start("a", "b")
    a = nodes.nodes["a"]
    keys = a.publish(N)
    a.announcer.owe("b", keys)  # as when the answer did not come within 20 ms
    before = a.control.n_records[Kind.PUT]
    nodes.run(3.0)
    assert a.control.n_records[Kind.PUT] == before


def test_an_owner_that_goes_on_missing_is_tried_less_and_less(start: Callable[..., DirectoryNodes]) -> None:
    nodes = start("a", "b")
    a, b = nodes.nodes["a"], nodes.nodes["b"]
    b.is_stopped = True
    keys = a.publish(10)
    before = a.control.n_requests
    nodes.run(200.0)
    assert 6 <= a.control.n_requests - before <= 30  # two a try
    b.is_stopped = False
    nodes.run(61.0)
    assert b.shard.get(keys)[0].all()


def test_an_owner_that_missed_too_much_is_compared_with(start: Callable[..., DirectoryNodes]) -> None:
    nodes = start("a", "b")
    a, b = nodes.nodes["a"], nodes.nodes["b"]
    keys = a.publish(800)
    b.lose_shard()
    for _ in range(MOST_KEYS // len(keys) + 1):
        a.announcer.owe("b", keys)
    nodes.run(5.0)
    assert b.shard.get(keys)[0].all()


def test_a_suspicion_moves_nothing(
    start: Callable[..., DirectoryNodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = start("a", "b", "c")
    a = nodes.nodes["a"]
    a.publish(N)
    before = a.directory.ring
    monkeypatch.setattr(Listing, "batch", lambda *_: pytest.fail("all pages are looked at"))
    members = [node.member for node in nodes.nodes.values()]
    a.directory.set_view(View([members[0], replace(members[1], state=State.SUSPECT), members[2]]))
    a.announcer.ring_changed()
    assert a.directory.ring.members[1].state is State.SUSPECT
    assert a.directory.ring.points is before.points
    nodes.run(1.0)
