"""Pages that are taken back: out of the pool, off the disk, out of the directory, and from nodes that keep copies."""

from __future__ import annotations

import time

import numpy as np

from p2pkv.cache.guests import Followers, TakingBack
from p2pkv.directory.client import DirectoryClient
from p2pkv.disk.tier import DiskTier
from p2pkv.page import Keys, Outcomes
from p2pkv.pool import Pool


class Withdrawals:
    """Thread-safe: as long as one is under way, ``taking_back`` keeps the pages from being handed over."""

    def __init__(
        self,
        pool: Pool,
        tier: DiskTier | None,
        directory: DirectoryClient,
        followers: Followers,
        taking_back: TakingBack,
    ) -> None:
        self._pool = pool
        self._tier = tier
        self._directory = directory
        self._followers = followers
        self._taking_back = taking_back

    def retract(self, ids: Keys, deadline: float) -> Outcomes:
        """Take back pages that this node published; ``HIT`` for those it had. They are gone at once.

        The deadline is for telling others.
        """
        with self._taking_back:
            return self._retract(ids, deadline)

    def _retract(self, ids: Keys, deadline: float) -> Outcomes:
        on_disk = np.zeros(len(ids), np.uint8)
        if self._tier is not None:
            # before the pool: its eviction would be announced as a page on disk
            on_disk, cold = self._tier.forget(ids)
            if on_disk.any():
                self._directory.drop(ids[on_disk == 1], cold[on_disk == 1], deadline, by_owner=True)
        found, locations = self._pool.retract(ids)
        if self._tier is not None:
            self._tier.forget(ids)  # what went from the pool to the disk, or back, between the two
        mask = found.astype(bool)
        if mask.any():
            self._directory.drop(ids[mask], locations[mask], deadline, by_owner=True)
        self._followers.tell(ids, deadline)
        return found | on_disk

    def clear(self, deadline: float) -> int:
        """Take back all pages that this node published; return the number of those in its pool.

        They are gone at once. The deadline is for the disk, on which that is written as well.
        """
        with self._taking_back:
            return self._clear(deadline)

    def _clear(self, deadline: float) -> int:
        if self._tier is not None:
            self._tier.clear()
        n_purged = self._pool.purge()
        if self._tier is not None:
            self._tier.clear()  # what went from the pool to the disk, or back, between the two
        self._followers.tell(None, deadline)
        if self._tier is not None:
            self._tier.wait_cleared(deadline - time.monotonic())
        return n_purged
