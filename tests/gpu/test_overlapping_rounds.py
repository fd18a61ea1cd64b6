"""Rounds of a call overlap: the next is on its way while one is copied, and none counts before its copy has ended."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

import pages
from cluster import eventually
from device_buffers import DeviceBuffer
from fake_cuda import FakeCuda
from p2pkv import Pieces
from pair import NBYTES, Pair
from threads import in_a_thread

Allocate = Callable[[int], DeviceBuffer]
N = 64
ROUND = 8
"""Pages of a round: a call's lease is half of the staging, and a round half of that."""
STAGING = 4 * ROUND * NBYTES
PATIENCE = 30.0


@pytest.fixture
def pair(emulated: FakeCuda, make_pair: Callable[..., Pair]) -> Pair:
    return make_pair(transports=["shm"], device_staging_size=STAGING, device_direct_size=0, touch=False)


@pytest.fixture
def keys() -> list[str]:
    return [f"page {i}" for i in range(N)]


@pytest.fixture
def published(pair: Pair, keys: list[str]) -> NDArray[np.uint8]:
    rows = pages.filled(keys, NBYTES)
    with pair.owner.register_memory(rows):
        assert pair.owner.publish(keys, rows).all()
    return rows


def _fetched(pair: Pair) -> float:
    return pair.reader.counters()['p2pkv_fetched_bytes_total{source="shm"}'] / NBYTES


def test_the_next_round_is_read_while_one_is_copied_and_no_further(
    emulated: FakeCuda, pair: Pair, allocate: Allocate, keys: list[str], published: NDArray[np.uint8]
) -> None:
    destination = allocate(N * NBYTES)
    pair.reader.register_memory(destination.array)
    emulated.hold(copies=True)
    before = emulated.counts().copies_to_device
    thread, outcomes = in_a_thread(
        lambda: pair.reader.fetch(keys, destination.rows(N, NBYTES), timeout=2 * PATIENCE)
    )
    for n in range(1, N // ROUND):
        # round n is held, or about to be, and the one after it is read
        eventually(lambda n=n: _fetched(pair) == (n + 1) * ROUND, PATIENCE)
        eventually(lambda n=n: emulated.counts().copies_to_device - before == n, PATIENCE)
        emulated.let_through(1)
    emulated.hold()
    thread.join(PATIENCE)
    assert outcomes[0].all()
    assert np.array_equal(destination.read().reshape(N, NBYTES), published)


def test_the_next_round_is_copied_while_one_goes_into_the_pool_and_no_further(
    emulated: FakeCuda, pair: Pair, allocate: Allocate, keys: list[str]
) -> None:
    source = allocate(N * NBYTES)
    pair.owner.register_memory(source.array)
    source.write(pages.filled(keys, NBYTES))
    emulated.hold(copies=True)
    before = emulated.counts().copies_to_host
    thread, outcomes = in_a_thread(
        lambda: pair.owner.publish(keys, source.rows(N, NBYTES), timeout=2 * PATIENCE)
    )
    for n in range(N // ROUND):
        # so many rounds have been copied, one more is held, and what has been copied goes into the pool meanwhile
        eventually(lambda n=n: emulated.counts().copies_to_host - before == n + 1, PATIENCE)
        eventually(lambda n=n: pair.owner.counters()["p2pkv_pool_pages"] == n * ROUND, PATIENCE)
        emulated.let_through(1)
    emulated.hold()
    thread.join(PATIENCE)
    assert outcomes[0].all()
    back = np.zeros((N, NBYTES), np.uint8)
    pair.reader.register_memory(back)
    assert pair.reader.fetch(keys, back).all()
    assert np.array_equal(back, pages.filled(keys, NBYTES))


def test_a_round_that_fails_is_missed_and_no_other(
    emulated: FakeCuda, pair: Pair, allocate: Allocate, keys: list[str], published: NDArray[np.uint8]
) -> None:
    destination = allocate(N * NBYTES)
    pair.reader.register_memory(destination.array)
    destination.write(np.full(N * NBYTES, 0x5A, np.uint8))
    emulated.fail("cuMemcpyHtoDAsync", 1, nth=3)
    outcomes = pair.reader.fetch(keys, destination.rows(N, NBYTES), timeout=PATIENCE)
    expected = np.ones(N, np.uint8)
    expected[2 * ROUND : 3 * ROUND] = 0
    assert np.array_equal(outcomes, expected)
    rows = destination.read().reshape(N, NBYTES)
    assert np.array_equal(rows[expected == 1], published[expected == 1])
    assert (rows[expected == 0] == 0x5A).all()


def test_a_device_that_is_lost_ends_the_call_with_what_was_there(
    emulated: FakeCuda, pair: Pair, allocate: Allocate, keys: list[str], published: NDArray[np.uint8]
) -> None:
    destination = allocate(N * NBYTES)
    pair.reader.register_memory(destination.array)
    emulated.hold(copies=True)
    thread, outcomes = in_a_thread(
        lambda: pair.reader.fetch(keys, destination.rows(N, NBYTES), timeout=2 * PATIENCE)
    )
    emulated.let_through(1)
    eventually(lambda: _fetched(pair) == 3 * ROUND, PATIENCE)  # the second round's copy is held
    emulated.lose()
    thread.join(PATIENCE)
    assert np.flatnonzero(outcomes[0]).tolist() == list(range(ROUND))
    counters = pair.reader.counters()
    assert counters['p2pkv_missed_pages_total{reason="device"}'] == N - ROUND
    assert counters["p2pkv_device_staging_lost_bytes"] == STAGING / 2


def test_an_error_amid_a_call_leaves_no_copy_under_way(
    emulated: FakeCuda, pair: Pair, allocate: Allocate, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = allocate(N * NBYTES)
    pair.owner.register_memory(source.array)
    emulated.delay_copies(20_000)
    emulated.hold(copies=True)
    emulated.let_through(1)
    stored = []

    def fail(*_: object) -> None:
        stored.append(emulated.counts().queued)
        emulated.hold()  # it begins now, and takes its time
        raise KeyboardInterrupt

    monkeypatch.setattr("p2pkv.pool.Pool.publish", fail)
    with pytest.raises(KeyboardInterrupt):
        pair.owner.publish(keys, source.rows(N, NBYTES), timeout=PATIENCE)
    assert stored == [1], "the next round's copy was under way"
    assert emulated.counts().queued == 0
    assert pair.owner.counters()["p2pkv_device_staging_used_bytes"] == 0


def test_pieces_of_a_round_are_one_launch(
    emulated: FakeCuda, pair: Pair, allocate: Allocate, keys: list[str], published: NDArray[np.uint8]
) -> None:
    destination = allocate(2 * N * NBYTES)
    pair.reader.register_memory(destination.array)
    every_other = np.array([[[destination.address + 2 * i * NBYTES, NBYTES]] for i in range(N)], np.int64)
    before = emulated.counts()
    assert pair.reader.fetch(keys, Pieces(every_other), timeout=PATIENCE).all()
    after = emulated.counts()
    assert after.copies_to_device - before.copies_to_device == N
    assert after.launches - before.launches == N // ROUND
    assert np.array_equal(destination.read().reshape(2 * N, NBYTES)[::2], published)


LARGE = STAGING // 2
"""A page that takes all of a call's lease: there are no halves."""


def test_rounds_of_pages_too_large_for_halves_do_not_overlap(
    emulated: FakeCuda, pair: Pair, allocate: Allocate
) -> None:
    keys = [f"large {i}" for i in range(6)]
    rows = np.zeros((len(keys), LARGE), np.uint8)
    pages.fill(rows, keys)
    source, destination = allocate(rows.nbytes), allocate(rows.nbytes)
    source.write(rows)
    pair.owner.register_memory(source.array)
    pair.reader.register_memory(destination.array)
    emulated.delay_copies(2_000)
    assert pair.owner.publish(keys, source.rows(len(keys), LARGE), timeout=PATIENCE).all()
    emulated.hold(copies=True)
    before = emulated.counts().copies_to_device
    thread, outcomes = in_a_thread(
        lambda: pair.reader.fetch(keys, destination.rows(len(keys), LARGE), timeout=2 * PATIENCE)
    )
    try:
        for n in range(1, len(keys) + 1):
            eventually(lambda n=n: _fetched(pair) * NBYTES >= n * LARGE, PATIENCE)
            eventually(lambda n=n: emulated.counts().copies_to_device - before == n, PATIENCE)
            assert _fetched(pair) * NBYTES == n * LARGE, "a round was read over one that is being copied"
            emulated.let_through(1)
    finally:
        emulated.hold()
        thread.join(PATIENCE)
    assert outcomes[0].all()
    assert np.array_equal(destination.read().reshape(len(keys), LARGE), rows)
