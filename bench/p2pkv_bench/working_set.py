"""The memory that pages come from and go to, so large that a page has left the cache when its turn comes again.

Every process of a benchmark fills its source with the same numbers, each of which occurs once. So both ends
know what every page of any size must be, and no page looks like another.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.node import Node
from p2pkv_bench.rows import MIB

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MAX_PAGES = 60_000
"""Of a size: the reader's location cache holds 65,536, and these should be found in it."""


def working_set_nbytes(n_sets: int = 6) -> int:
    """Return 512 MiB, or less if ``n_sets`` of them, which are needed, are more than half of the free memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 128 * MIB
    return int(np.clip(free // (2 * n_sets) // (64 * MIB), 1, 8)) * 64 * MIB


class Source:
    """Shared memory, as a pool's is, with known pages."""

    def __init__(self, nbytes: int) -> None:
        self.region = _native.SharedRegion.create(nbytes)  # keeps the memory mapped
        self.array: NDArray[np.uint8] = self.region.array
        words = self.array.view(np.uint64)
        step = MIB
        for first in range(0, len(words), step):
            part = words[first : first + step]
            np.multiply(np.arange(first + 1, first + 1 + len(part), dtype=np.uint64), _ODD, out=part)

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    def register(self, node: Node, *, readable: bool) -> None:
        """Let a node publish from it, and with ``readable`` offer it to peers."""
        node.register_address(self.address, self.array.nbytes, self.region, readable=readable)

    def pages(self, page_nbytes: int) -> NDArray[np.uint8]:
        """Return all pages of one size, as rows."""
        n_pages = n_pages_of(self.array.nbytes, page_nbytes)
        return self.array[: n_pages * page_nbytes].reshape(n_pages, page_nbytes)

    def checksums(self, page_nbytes: int) -> NDArray[np.uint64]:
        """Return what the checksum of each page must be."""
        return checksums(self.pages(page_nbytes))


def n_pages_of(nbytes: int, page_nbytes: int) -> int:
    """Return how many pages of one size a benchmark uses of ``nbytes``."""
    return min(nbytes // page_nbytes, _MAX_PAGES)


class Destination:
    """Private memory that pages are brought to, slot after slot.

    It has fewer slots than there are pages, so that a page never meets itself in the slot it is brought to:
    what an earlier round left there can't pass for what this round should have brought.
    """

    def __init__(self, nbytes: int) -> None:
        self.array = np.ones(nbytes, np.uint8)

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    def slots(self, page_nbytes: int) -> NDArray[np.uint8]:
        n_pages = n_pages_of(self.array.nbytes, page_nbytes)
        n_slots = n_pages - max(1, n_pages // 37)
        return self.array[: n_slots * page_nbytes].reshape(n_slots, page_nbytes)


class Rotation:
    """Hands out neighbouring places, over and over, so that what was used last is used again last."""

    def __init__(self, n_places: int) -> None:
        self._n_places = n_places
        self._next = 0

    def take(self, n: int) -> int:
        """Return the first of ``n`` neighbouring places."""
        assert n <= self._n_places, f"{n} of {self._n_places} places"
        if self._next + n > self._n_places:
            self._next = 0
        first = self._next
        self._next += n
        return first


def checksums(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the checksum of each row."""
    pieces = np.empty((len(rows), 1, 2), np.int64)
    pieces[:, 0, 0] = rows.ctypes.data + np.arange(len(rows)) * rows.strides[0]
    pieces[:, 0, 1] = rows.shape[1]
    return _native.checksum_pages(pieces)
