"""What a node has to tell the directory: its pages, batch by batch, where each is now."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from p2pkv.disk.tier import DiskTier
from p2pkv.page import RESIDENT, Keys, Locations
from p2pkv.pool import Pool


def locate(pool: Pool, tier: DiskTier | None, keys: Keys) -> tuple[NDArray[np.bool_], Locations]:
    """Return a mask ``(n,)`` of the pages that are in the pool or on disk, and where each lies, zeros if nowhere."""
    found, locations = pool.lookup(keys) if tier is None else tier.locate(keys)
    return found.astype(bool), locations


class Listing:
    """One pass over all pages: first the pool's, then those on disk only. What stays throughout is listed once."""

    def __init__(self, pool: Pool, tier: DiskTier | None) -> None:
        self._pool = pool
        self._tier = tier
        self._cursor = 0
        self._has_pool = True
        self.is_over = False

    def batch(self, limit: int) -> tuple[Keys, Locations]:
        """Return the next pages, ``limit`` at most, perhaps none; one that raised can be called again."""
        if self._has_pool:
            keys, locations, cursor = self._pool.list(self._cursor, limit)
            self._has_pool = cursor != 0
            self.is_over = cursor == 0 and self._tier is None
        else:
            assert self._tier is not None
            keys, cursor = self._tier.list(self._cursor, limit)
            found, locations = self._tier.locate(keys)
            cold = found.astype(bool) & (locations["flags"] & RESIDENT == 0)
            keys, locations = keys[cold], locations[cold]
            self.is_over = cursor == 0
        self._cursor = cursor
        return keys, locations
