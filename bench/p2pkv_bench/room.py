"""How much of a pool its pages can use, whatever their sizes, and how long one publish keeps the pool to itself.

What counts is how many granules a page takes, not how large a granule is: so pages are here 64 times smaller than they
are named, in a pool of granules of 64 bytes instead of 4 KiB. All else is the pool's own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from p2pkv.page import Keys
from p2pkv.pool import Mask, Pieces, Pool, PoolStatus
from p2pkv_bench.errors import BenchError
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import percentile
from p2pkv_bench.rows import KIB, MIB, Row, Target, make_row

SCALE = 64
"""How much smaller pages and granules are here."""
_ODD = np.uint64(0x9E3779B97F4A7C15)
GRANULE = 4096
_BATCH = 64
_SIZES = (*(int(mib * MIB) for mib in (2.25, 2.5, 2.94, 4.29, 4.5)), 36 * KIB, 292 * KIB)
_MIXES = {
    "2.25, 2.94 and 4.29 MiB": (int(2.25 * MIB), int(2.94 * MIB), int(4.29 * MIB)),
    "36 KiB, 2.25 and 16 MiB": (36 * KIB, int(2.25 * MIB), 16 * MIB),
    "40 sizes": tuple(400 * KIB + i * 212 * KIB for i in range(40)),
}
_POOL_PAGES = 64
_MIXED_POOL = 4 << 30
_ALONE_SHARE = 0.97
_MIXED_SHARE = 0.93
_PUBLISHES = 1_000_000
_MILLION = 1_000_000
_HOLD_US = 100.0


class ScaledPool:
    """A pool of ``nbytes`` of memory as it were, each page of a name that no other has."""

    def __init__(self, nbytes: int) -> None:
        self._pool = Pool(granules(nbytes) * SCALE, owner=1, boot=1, granule=SCALE, evictions_kept=0)
        self._source = np.zeros(granules(nbytes) * SCALE, np.uint8)

    def contains(self, names: NDArray[np.uint64]) -> Mask:
        """Say which pages are there."""
        return self._pool.lookup(_keys_of(names))[0]

    def publish(self, names: NDArray[np.uint64], sizes: NDArray[np.int64]) -> int:
        """Publish pages of these sizes, or use them where they are there; return how many then are."""
        published = self._pool.publish(_keys_of(names), self._pieces_of(sizes))
        return int((published.statuses <= PoolStatus.EXISTS).sum())

    def publish_us(
        self, names: NDArray[np.uint64], sizes: NDArray[np.int64]
    ) -> tuple[list[float], list[float]]:
        """Publish each page by itself, and look it up; return the microseconds of CPU of the calls of either kind."""
        keys, pieces = _keys_of(names), self._pieces_of(sizes)
        publishes, look_ups = [], []
        for i in range(len(names)):
            key, piece = keys[i : i + 1], pieces[i : i + 1]
            began = time.thread_time_ns()
            self._pool.publish(key, piece)
            published = time.thread_time_ns()
            found, _ = self._pool.lookup(key)
            looked_up = time.thread_time_ns()
            publishes.append((published - began) / 1e3)
            look_ups.append((looked_up - published) / 1e3)
            if not found.all():
                raise BenchError("a page found no room")
        return publishes, look_ups

    def _pieces_of(self, sizes: NDArray[np.int64]) -> Pieces:
        pieces = np.zeros((len(sizes), 1, 2), np.int64)
        pieces[:, 0, 0] = self._source.ctypes.data
        pieces[:, 0, 1] = -(-sizes // GRANULE) * SCALE
        return pieces

    @property
    def is_evicting(self) -> bool:
        """Whether it has been full."""
        return self._pool.stats()["evicted_pages"] > 0

    @property
    def share(self) -> float:
        """The part of it that holds pages."""
        stats = self._pool.stats()
        return stats["used"] / stats["capacity"]


def _keys_of(names: NDArray[np.uint64]) -> Keys:
    keys = np.zeros((len(names), 2), np.uint64)
    keys[:, 0] = (names + np.uint64(1)) * _ODD
    keys[:, 1] = names
    return keys.view(np.uint8)


def granules(nbytes: int) -> int:
    """Return how many granules of 4 KiB so many bytes take."""
    return -(-nbytes // GRANULE)


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Fill pools with pages of one size, of several, and with a million."""
    for nbytes in _SIZES:
        plan.tell(f"room: pages of {nbytes / MIB:.3g} MiB")
        # what the pool has beyond whole pages is what they can't use
        pool_nbytes = granules(_POOL_PAGES * nbytes + nbytes // 2) * GRANULE
        shares = _churn(pool_nbytes, (nbytes,), 10 * _POOL_PAGES)
        yield _row(f"{_POOL_PAGES} pages and a half", nbytes, shares, _ALONE_SHARE)
    for name, sizes in _MIXES.items():
        plan.tell(f"room: pages of {name}, a million of them")
        shares = _churn(_MIXED_POOL, sizes, _PUBLISHES)
        yield _row(f"{name}, 4 GiB", 0, shares, _MIXED_SHARE)
    plan.tell("room: a million pages in the pool")
    figures = [_publish_us(_MILLION) for _ in range(plan.rounds)]
    for percent, target in ((50.0, None), (99.0, None), (99.99, Target(_HOLD_US, at_most=True))):
        yield make_row(
            {
                "p2pkv": [percentile(publishes, percent) for publishes, _ in figures],
                "a look-up": [percentile(look_ups, percent) for _, look_ups in figures],
            },
            suite="room",
            case=f"publish among a million pages, CPU time, p{percent:g}",
            unit="us",
            batch=1,
            target=target,
        )


def _row(case: str, nbytes: int, shares: Sequence[float], target: float) -> Row:
    """The row's spread is the median, the least and the greatest of all times after the pool was full first."""
    return make_row(
        {"p2pkv": list(shares)},
        suite="room",
        case=case,
        unit="of the pool",
        page_nbytes=nbytes,
        target=Target(target),
    )


def _churn(pool_nbytes: int, sizes: Sequence[int], n_publishes: int) -> list[float]:
    """Publish; four fifths of the bytes are of one size, another one every fifth of the way."""
    random = np.random.default_rng(1)
    pool = ScaledPool(pool_nbytes)
    weights = 1.0 / np.array(sizes)
    shares = []
    for first in range(0, n_publishes, _BATCH):
        names = np.arange(first, first + _BATCH, dtype=np.uint64)
        often = first * 5 // n_publishes % len(sizes)
        bytes_of = np.full(len(sizes), 0.2 / max(1, len(sizes) - 1))
        bytes_of[often] = 0.8
        chances = bytes_of * weights / (bytes_of * weights).sum()
        chosen = np.array(sizes)[random.choice(len(sizes), _BATCH, p=chances)]
        if len(sizes) > 1 and chosen.sum() * 4 > pool_nbytes:
            chosen = chosen[:8]
        pool.publish(names[: len(chosen)], chosen)
        if pool.is_evicting:
            shares.append(pool.share)
    if not shares:
        raise BenchError("the pool never got full")
    return shares


def _publish_us(n_pages: int) -> tuple[list[float], list[float]]:
    """Return the microseconds of CPU of publishes of a page that evict others of three small sizes, and of look-ups.

    A publish has two holds of the pool's lock: each is shorter than the call. CPU time, because on a busy machine
    others take the processor away for milliseconds; a look-up, which does next to nothing, says what that is worth.
    """
    sizes = np.array([1, 2, 5]) * GRANULE
    random = np.random.default_rng(2)
    pool = ScaledPool(int(sizes.mean()) * n_pages)
    first = 0
    while not pool.is_evicting:
        pool.publish(np.arange(first, first + 4096, dtype=np.uint64), random.choice(sizes, 4096))
        first += 4096
    n = n_pages // 10
    gc.collect()
    gc.disable()  # a collection in one of a thousand calls would be what the last percentiles show
    try:
        return pool.publish_us(np.arange(first, first + n, dtype=np.uint64), random.choice(sizes, n))
    finally:
        gc.enable()
