"""How many pages a pool really holds: more are stored than there is room for, then all are asked for."""

from __future__ import annotations

import numpy as np

from p2pkv_bench.errors import BenchError
from p2pkv_bench.peers import base
from p2pkv_bench.working_set import Source, checksums

_BATCH = 8
_STORED = 1.5
"""Times as many bytes as the pool has."""


def n_kept(pool: base.Pool, pool_nbytes: int, page_nbytes: int) -> int:
    """Return how many pages were brought, each with the bytes that were stored.

    Pages come one after another, each of them once; those that were refused or evicted the pool had no room for. Raises
    BenchError for one that is brought with other bytes.
    """
    source = Source(_BATCH * page_nbytes)
    rows = source.pages(page_nbytes)
    pool.use(rows)
    names = range(0, int(pool_nbytes * _STORED) // page_nbytes, _BATCH)
    expected = []
    for first in names:
        rows.view(np.uint64)[:, 0] = np.arange(first, first + _BATCH)  # no page is like another
        expected.append(checksums(rows))
        pool.put(_keys(first))
    n_found = 0
    for first, sums in zip(names, expected, strict=True):
        rows[:, :] = 0
        found = pool.get(_keys(first))
        wrong = found & (checksums(rows) != sums)
        if wrong.any():
            raise BenchError(f"page {first + int(wrong.argmax())} was brought with wrong bytes")
        n_found += int(found.sum())
    return n_found


def _keys(first: int) -> list[str]:
    return [f"page-{number}" for number in range(first, first + _BATCH)]
