"""What more memory would give: different pages are estimated well, whatever their number, and cost little."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest

from cluster import eventually
from p2pkv import Config, Node
from p2pkv.cache.working_set import WorkingSetWatch
from p2pkv.directory.view import Member
from p2pkv.explain.messages import Answer, Question, WorkingSetShare, decode
from p2pkv.explain.working_sets import WorkingSets
from p2pkv.metrics.working_set import Distinct, Share, WorkingSet, together

SEED = 20261125


@pytest.mark.parametrize("n", [0, 1, 100, 5_000, 30_000, 300_000])
def test_different_keys_are_counted_within_four_standard_errors(n: int) -> None:
    keys = np.random.default_rng(SEED).integers(0, 256, (n, 16), np.uint8)
    distinct = Distinct()
    for part in np.array_split(keys, 7):
        distinct.add(part)
    assert distinct.estimate() == pytest.approx(n, rel=4 * 0.0081, abs=0.5)


def test_a_key_that_comes_again_changes_nothing() -> None:
    keys = np.random.default_rng(SEED).integers(0, 256, (10_000, 16), np.uint8)
    distinct = Distinct()
    distinct.add(keys)
    before = distinct.estimate()
    distinct.add(keys[::-1])
    assert distinct.estimate() == before


def test_keys_of_nothing_but_zeros_or_ones_are_keys_too() -> None:
    distinct = Distinct()
    distinct.add(np.zeros((1, 16), np.uint8))
    distinct.add(np.full((1, 16), 255, np.uint8))
    assert distinct.estimate() == pytest.approx(2, abs=0.1)


def test_a_set_that_has_seen_nothing_promises_nothing() -> None:
    assert set(WorkingSet().readings(0, 0).values()) == {0.0}


def test_what_is_seen_by_several_threads_is_seen() -> None:
    keys = np.random.default_rng(SEED).integers(0, 256, (40_000, 16), np.uint8)
    distinct, alone = Distinct(), Distinct()
    alone.add(keys)
    threads = [threading.Thread(target=distinct.add, args=(part,)) for part in np.array_split(keys, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert distinct.estimate() == alone.estimate()


def test_pages_that_were_evicted_and_computed_again_are_what_memory_would_give() -> None:
    with Node.start(Config(node_id="n", pool_size="64KiB", buffer_size=0)) as node:
        pages = np.ones((8, 4096), np.uint8)
        node.register_memory(pages)
        for _ in range(3):
            for first in range(0, 64, 8):  # 64 pages through a pool of 16
                node.publish([f"page-{first + i}" for i in range(8)], pages)
        _looked_at(node)
        counters = node.counters()
    assert counters["p2pkv_published_pages_total"] == 192
    assert counters["p2pkv_distinct_published_pages"] == pytest.approx(64, abs=2)
    assert counters["p2pkv_hit_rate_ratio"] == 0.0
    assert counters["p2pkv_hit_rate_ceiling_ratio"] == pytest.approx(2 / 3, abs=0.02)


def _looked_at(node: Node) -> WorkingSetWatch:
    """Have a node estimate anew, and its cluster if that is its turn."""
    caching = node._parts.caching
    assert caching is not None
    caching.announcer.tell_changed(idle=0.0)
    caching.working_set.turn()
    return caching.working_set


def test_what_two_nodes_computed_counts_once_for_their_cluster() -> None:
    with (
        Node.start(Config(node_id="n1", pool_size="64KiB", buffer_size=0)) as first,
        Node.start(Config(node_id="n2", join=first.address, pool_size="64KiB", buffer_size=0)) as second,
        Node.start(Config(node_id="n0", join=first.address, pool_size=0, buffer_size=0)) as poolless,
    ):
        nodes = (first, second, poolless)
        eventually(lambda: all(len(node.members()) == 3 for node in nodes), 10.0)
        pages = np.ones((8, 4096), np.uint8)
        for node in (first, second):
            node.register_memory(pages)
            for begin in range(0, 64, 8):  # 64 pages through a pool of 16
                node.publish([f"page-{begin + i}" for i in range(8)], pages)
        for node in (second, first):
            _looked_at(node).turn_of_all()
        of_first, of_second = first.counters(), second.counters()
        shown = poolless.counters()
    for counters in (of_first, of_second):
        assert counters["p2pkv_hit_rate_ceiling_ratio"] == pytest.approx(0, abs=0.02)
    assert of_first["p2pkv_cluster_distinct_published_pages"] == pytest.approx(64, abs=2)
    assert of_first["p2pkv_cluster_hit_rate_ceiling_ratio"] == pytest.approx(1 / 2, abs=0.02)
    assert of_first["p2pkv_cluster_hit_rate_ratio"] == 0.0
    assert of_second["p2pkv_cluster_hit_rate_ceiling_ratio"] == 0.0  # the first one has asked
    assert "p2pkv_cluster_hit_rate_ceiling_ratio" not in shown


def test_shares_together_are_those_of_one_who_has_seen_all() -> None:
    numbers = np.random.default_rng(SEED)
    parts = [numbers.integers(0, 256, (n, 16), np.uint8) for n in (3000, 1, 20_000)]
    alone, shares = Distinct(), []
    for part in [*parts, parts[0]]:
        alone.add(part)
        one = WorkingSet()
        one.left(part)
        shares.append(one.share(len(part), 0))
    shown = together(shares)
    assert shown["p2pkv_cluster_distinct_published_pages"] == alone.estimate()
    assert shown["p2pkv_cluster_hit_rate_ceiling_ratio"] == pytest.approx(3000 / 26_001, abs=0.01)
    assert set(together([]).values()) == {0.0}


GOOD = Distinct().registers()


@pytest.mark.parametrize(
    ("published", "found", "registers"),
    [
        (1.0, 0.0, b""),
        (1.0, 0.0, GOOD[:-1]),
        (1.0, 0.0, GOOD[:-1] + b"\xff"),
        (-1.0, 0.0, GOOD),
        (1.0, float("nan"), GOOD),
        (float("inf"), 0.0, GOOD),
    ],
)
def test_a_share_that_no_node_has_is_left_out(
    published: float, found: float, registers: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(question: Question, timeout: float) -> list[Answer]:
        assert question.working_set
        good, bad = WorkingSetShare(3.0, 4.0, GOOD), WorkingSetShare(published, found, registers)
        return [
            Answer("old", "", 0),
            Answer("bad", "", 0, working_set=bad),
            Answer("good", "", 0, working_set=good),
        ]

    members = [Member("own", 1, ""), Member("bad", 1, ""), Member("a", 1, "", weight=0.0)]
    assert WorkingSets("own", lambda: members, ask).gather() is None  # bad is the first of those with pages
    assert WorkingSets("bad", lambda: members, ask).gather() == [Share(3.0, 4.0, GOOD)]
    assert "the working set of node bad is left out" in caplog.text


def test_what_a_node_had_that_died_or_was_restarted_still_counts() -> None:
    told = {"b": WorkingSetShare(3.0, 4.0, GOOD), "c": WorkingSetShare(5.0, 6.0, GOOD)}
    members = [Member("a", 1, ""), Member("b", 1, ""), Member("c", 1, "")]

    def ask(question: Question, timeout: float) -> list[Answer]:
        return [Answer(name, "", 0, working_set=share) for name, share in told.items()]

    sets = WorkingSets("a", lambda: members, ask)
    assert sets.gather() == [Share(3.0, 4.0, GOOD), Share(5.0, 6.0, GOOD)]
    members[1:] = [Member("c", 2, "")]
    del told["b"]
    told["c"] = WorkingSetShare(1.0, 0.0, GOOD)
    assert sorted(sets.gather() or []) == [
        Share(1.0, 0.0, GOOD),
        Share(3.0, 4.0, GOOD),
        Share(5.0, 6.0, GOOD),
    ]


def test_who_only_misses_has_no_hit_rate_of_a_hundred_percent() -> None:
    with Node.start(Config(node_id="n", pool_size="64KiB", buffer_size=0)) as node:
        pages = np.ones((1, 4096), np.uint8)
        node.register_memory(pages)
        node.publish(["page"], pages)
        assert node.fetch(["page"], pages).all()
        for i in range(9):
            assert not node.fetch([f"nobody has {i}"], pages).any()
        _looked_at(node)
        assert node.counters()["p2pkv_hit_rate_ratio"] == pytest.approx(0.1)


def test_the_share_of_a_node_that_knows_only_questions_about_pages_is_not_waited_for() -> None:
    """Nodes ignore fields that they do not know, of questions and of answers."""
    known_before = {
        "version": 1,
        "node_id": "n",
        "namespace": "",
        "epoch": 0,
        "pages": [],
        "remembers_since": [],
    }
    assert decode(msgspec.msgpack.encode(known_before), Answer).working_set is None
