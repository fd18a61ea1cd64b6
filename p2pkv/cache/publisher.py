"""What a publish does once its call is checked: pages go into the pool, and the directory and the disk are told.

Pages of host memory take one call of native code for both; those of a device come through the staging, in rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from p2pkv import _native
from p2pkv.cache.call import PageCall
from p2pkv.cache.device_rounds import DevicePages
from p2pkv.cache.lengths import check_published_lengths, too_large
from p2pkv.directory.asking import do_nothing
from p2pkv.directory.client import DirectoryClient
from p2pkv.disk.tier import DiskTier
from p2pkv.metrics import Metrics
from p2pkv.page import Keys, Outcomes
from p2pkv.pool import Pool, PoolStatus

_ROUNDS = 2
"""So often a publish is made once more, because guests' pages took the places of its own meanwhile."""


class Publisher:
    """Thread-safe. ``deadline`` is a time of ``time.monotonic()``; calls return by then."""

    def __init__(
        self,
        *,
        pool: Pool,
        directory: DirectoryClient,
        guests: _native.Guests,
        tier: DiskTier | None,
        device_pages: DevicePages,
        metrics: Metrics,
    ) -> None:
        """Store nothing yet. ``guests``: pages in the pool that other nodes have published."""
        self._pool = pool
        self._directory = directory
        self._guests = guests
        self._tier = tier
        self._device_pages = device_pages
        self._metrics = metrics
        self._is_draining = False

    def drain(self) -> None:
        """Store no more of what is published."""
        self._is_draining = True

    def publish(self, call: PageCall, deadline: float, began: float, *, is_current: bool) -> Outcomes:
        """Copy pages into the pool and tell the directory; ``HIT`` for those that can be fetched now.

        Nothing is stored if the epoch of the pages is not ``is_current``, and nothing once this node is draining.
        """
        largest = int(call.lengths.max())
        if largest > self._pool.largest_page:
            raise too_large(largest, self._pool)
        if not is_current:
            return self._store_nothing(call, "epoch")
        if self._is_draining:
            return self._store_nothing(call, "draining")
        # What is published here is this node's own: it must not go when a page of another's does.
        self._guests.take_out(call.ids)
        outcomes = self._publish(call, deadline, began)
        for _ in range(_ROUNDS):  # one came between the two, and was taken for what is published here
            if not self._guests.take_out(call.ids):
                break
            outcomes = self._publish(call, deadline, began)
        return outcomes

    def _store_nothing(self, call: PageCall, why: str) -> Outcomes:
        self._count_unpublished(**{why: len(call.ids)})
        return np.zeros(len(call.ids), np.uint8)

    def _publish(self, call: PageCall, deadline: float, began: float) -> Outcomes:
        if call.device_of is not None:
            return self._publish_from_device(call, deadline, began)
        outcomes, n_readable, nbytes, n_late, n_changed, may_be_gone = self._directory.publish(
            self._pool,
            call.ids,
            call.pieces,
            deadline,
            tier=None if self._tier is None else self._tier.native,
        )
        n_pages = len(outcomes)
        if n_readable < n_pages:
            check_published_lengths(self._pool, call)
        if may_be_gone and self._tier is not None:
            self._recheck_evicted(self._tier, call.ids)
        n_published = int(np.count_nonzero(outcomes))
        if n_published < n_pages:
            self._count_unpublished(
                changed=n_changed,
                timed_out=n_late,
                no_room=n_pages - n_readable - n_late - n_changed,
                # below 0 where another call has stored meanwhile what this one had no time for
                no_directory=max(0, n_readable - n_published),
            )
        self._metrics.published_pages.inc(n_published)
        self._metrics.published_bytes.inc(nbytes)
        self._metrics.timings.publishes.native.add(0, nbytes, time.monotonic() - began)
        return outcomes

    def _publish_from_device(self, call: PageCall, deadline: float, began: float) -> Outcomes:
        check_published_lengths(self._pool, call)
        statuses, locations, n_readable, nbytes = self._device_pages.publish(call, deadline)
        if (statuses == PoolStatus.OTHER_LENGTH).any():
            check_published_lengths(self._pool, call)
        outcomes = np.zeros(len(statuses), np.uint8)
        there = np.flatnonzero(statuses <= PoolStatus.EXISTS)
        if n_readable:
            outcomes[there] = self._directory.put(
                call.ids[there], locations[there], deadline, meanwhile=self._note(call)
            )
        if self._tier is not None:
            self._recheck_evicted(self._tier, call.ids)
        n_published = int(np.count_nonzero(outcomes))
        if n_published < len(statuses):
            n_failed = int(np.count_nonzero(statuses == PoolStatus.NOT_TRIED))
            n_changed = int(np.count_nonzero(statuses == PoolStatus.CHANGED))
            self._count_unpublished(
                changed=n_changed,
                device=n_failed,
                no_room=len(statuses) - n_readable - n_failed - n_changed,
                no_directory=n_readable - n_published,
            )
        self._metrics.published_pages.inc(n_published)
        self._metrics.published_bytes.inc(nbytes)
        self._metrics.timings.publishes.native.add(0, nbytes, time.monotonic() - began)
        return outcomes

    def _count_unpublished(self, **pages: int) -> None:
        """Count pages by why they can't be fetched."""
        for reason, n in pages.items():
            self._metrics.count(self._metrics.unpublished_pages, reason, n)

    def _note(self, call: PageCall) -> Callable[[], None]:
        """Return what tells the disk of published pages."""
        return partial(self._tier.note_published, call.ids) if self._tier is not None else do_nothing

    def _recheck_evicted(self, tier: DiskTier, ids: Keys) -> None:
        """Have the directory told again of pages that were evicted while it was told that they are in the pool."""
        found, _ = self._pool.lookup(ids)
        if not found.all():
            tier.recheck(ids[found == 0])
