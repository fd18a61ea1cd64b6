"""What more memory would give: different pages are estimated well, whatever their number, and cost little."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from p2pkv import Config, Node
from p2pkv.metrics.working_set import Distinct, WorkingSet

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
        caching = node._parts.caching
        assert caching is not None
        pages = np.ones((8, 4096), np.uint8)
        node.register_memory(pages)
        for _ in range(3):
            for first in range(0, 64, 8):  # 64 pages through a pool of 16
                node.publish([f"page-{first + i}" for i in range(8)], pages)
        caching.announcer.tell_changed(idle=0.0)
        caching.working_set.turn()
        counters = node.counters()
    assert counters["p2pkv_published_pages_total"] == 192
    assert counters["p2pkv_distinct_published_pages"] == pytest.approx(64, abs=2)
    assert counters["p2pkv_hit_rate_ratio"] == 0.0
    assert counters["p2pkv_hit_rate_ceiling_ratio"] == pytest.approx(2 / 3, abs=0.02)
