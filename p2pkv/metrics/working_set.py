"""What more memory would give: how many different pages a node has published, and so how often it computed one again.

An engine finds each page of a prompt or computes it, and publishes what it computed. A page that is published a second
time had been evicted, or was behind one that had: with more memory it would have been a hit. Published pages are
counted; different ones are estimated by a HyperLogLog, 16 KiB however many there are, with a standard error of
0.8 %. Keys are hashes already, so they are taken as they are. The estimator is Ertl's ("New cardinality estimation
algorithms for HyperLogLog sketches", 2017), which needs no table of biases.

Sketches of several nodes make one: a page that two nodes published is in it once. So the members of a cluster together
know what a memory without end, which all of them find everything in, would give.

Libraries of such sketches take one item a call; this takes a batch, 10 to 100 ns a page.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PRECISION = 14
_REGISTERS = 1 << _PRECISION
_LONGEST = 53
"""Bits of a key that are looked at for a run of zeros: as many as a double has, whose exponent tells its length."""
_AT_ONCE = 4096
"""Pages that are added with the interpreter held, 0.1 to 0.4 ms."""

Keys = NDArray[np.uint8]


class Distinct:
    """Estimates how many different keys it has seen; ``(n, 16)`` uint8, uniformly distributed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the registers
        self._registers = np.zeros(_REGISTERS, np.uint8)

    def add(self, keys: Keys) -> None:
        """See keys, any of them seen before."""
        for start in range(0, len(keys), _AT_ONCE):
            halves = np.ascontiguousarray(keys[start : start + _AT_ONCE]).view(np.uint64)
            places = halves[:, 0] & np.uint64(_REGISTERS - 1)
            rest = halves[:, 1] >> np.uint64(64 - _LONGEST)
            lengths = np.frexp(rest.astype(np.float64))[1]  # bits up to the first one
            with self._lock:
                np.maximum.at(
                    self._registers, places.astype(np.intp), (_LONGEST + 1 - lengths).astype(np.uint8)
                )

    def registers(self) -> bytes:
        """Return what it knows, for :meth:`merge` elsewhere."""
        with self._lock:
            return self._registers.tobytes()

    def merge(self, registers: bytes) -> None:
        """See all keys that another one has seen. Raises ValueError for what none could have told."""
        others = np.frombuffer(registers, np.uint8)
        if len(others) != _REGISTERS or others.max() > _LONGEST + 1:
            raise ValueError(f"{len(others)} bytes are no registers of a HyperLogLog")
        with self._lock:
            np.maximum(self._registers, others, out=self._registers)

    def estimate(self) -> float:
        """Return how many different keys were seen, in the mean within 0.8 %."""
        with self._lock:
            counts = np.bincount(self._registers, minlength=_LONGEST + 2)
        z = _REGISTERS * _tau(1 - counts[_LONGEST + 1] / _REGISTERS)
        for count in counts[_LONGEST:0:-1]:
            z = 0.5 * (z + float(count))
        z += _REGISTERS * _sigma(counts[0] / _REGISTERS)
        return _REGISTERS * _REGISTERS / (2 * math.log(2) * z) if math.isfinite(z) else 0.0


class Share(NamedTuple):
    """What one node has of the working set of its cluster."""

    n_published: float
    n_found: float
    """Pages that its calls found."""
    registers: bytes
    """Of the pages that it published."""


def together(shares: Iterable[Share]) -> dict[str, float]:
    """Return what is shown of the whole cluster. Raises ValueError for a share that no node has."""
    all_pages = Distinct()
    n_published = n_found = 0.0
    for share in shares:
        if not (0 <= share.n_published < math.inf and 0 <= share.n_found < math.inf):
            raise ValueError(f"{share.n_published} and {share.n_found} are no numbers of pages")
        all_pages.merge(share.registers)
        n_published += share.n_published
        n_found += share.n_found
    distinct, rate, ceiling = _rates(all_pages, n_published, n_found)
    return {
        "p2pkv_cluster_distinct_published_pages": distinct,
        "p2pkv_cluster_hit_rate_ratio": rate,
        "p2pkv_cluster_hit_rate_ceiling_ratio": ceiling,
    }


def _rates(pages: Distinct, n_published: float, n_found: float) -> tuple[float, float, float]:
    """Return how many pages there were, the hit rate, and what it would have been had none of them ever gone."""
    distinct, asked = min(pages.estimate(), n_published), n_published + n_found
    return (distinct, n_found / asked, (asked - distinct) / asked) if asked else (distinct, 0.0, 0.0)


class WorkingSet:
    """Counts the pages that one node's pool has had, and says what a pool without end would have found.

    Evicted pages are told by who hears of them; those that are there are looked at by :meth:`look`, from time to time.
    """

    def __init__(self) -> None:
        self._distinct = Distinct()

    def left(self, keys: Keys) -> None:
        """Note pages that have left the pool."""
        self._distinct.add(keys)

    def look(self, listed: Iterable[Keys], rest: Callable[[], object]) -> None:
        """Note the pages that are there, a batch at a time; ``rest`` is called between two batches."""
        for keys in listed:
            self._distinct.add(keys)
            rest()

    def readings(self, n_published: float, n_found: float) -> dict[str, float]:
        """Return what is shown; ``n_published`` pages were computed and published here, and ``n_found`` were hits."""
        distinct, rate, ceiling = _rates(self._distinct, n_published, n_found)
        return {
            "p2pkv_distinct_published_pages": distinct,
            "p2pkv_hit_rate_ratio": rate,
            "p2pkv_hit_rate_ceiling_ratio": ceiling,
        }

    def share(self, n_published: float, n_found: float) -> Share:
        """Return what this node has of its cluster's."""
        return Share(n_published, n_found, self._distinct.registers())


def _sigma(x: float) -> float:
    """Ertl's correction for registers that have seen nothing."""
    if x == 1.0:
        return math.inf
    y, z = 1.0, x
    while True:
        x *= x
        before = z
        z += x * y
        y += y
        if z == before:
            return z


def _tau(x: float) -> float:
    """Ertl's correction for registers that can't grow any more."""
    if x in (0.0, 1.0):
        return 0.0
    y, z = 1.0, 1 - x
    while True:
        x = math.sqrt(x)
        before = z
        y *= 0.5
        z -= (1 - x) ** 2 * y
        if z == before:
            return z / 3
