"""Pages in device memory, published through the host's node.

The engine copies them into its staging, which its node maps, and the node pulls them from there: a round of them as if
the call had been for that host memory, while the next round's copies are under way. The node is asked for a round when
its copies have ended, and the call waits for the answer, or has taken the request back, before that part of the staging
is used again.

What lies in the pool already is not copied. It is named to the node without its bytes, which no round could do: nobody
keeps the page from being evicted meanwhile, and then other bytes would be stored under its key.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.attach.misfit import misfit
from p2pkv.cache.call import PageCall
from p2pkv.cache.device_rounds import DevicePages
from p2pkv.cache.staging_room import Round
from p2pkv.page import as_locations

_MISSED_S = 0.02
"""It is what telling the node takes that owners of entries may lack what it stored: a call may be over its deadline."""


@dataclass(slots=True)
class Stored:
    """It says what became of a publish."""

    published: _native.AttachedPublish
    """The pages that can be read now, and what the directory is to be told of them, as the node has said it last."""
    nbytes: int
    """These are of pages that were stored."""
    unstored: dict[str, int]
    """How many pages are not there, by the reasons of ``p2pkv_unpublished_pages_total``."""


class DevicePublishing:
    """Thread-safe."""

    def __init__(self, pages: DevicePages, known: _native.LocationCache) -> None:
        """``known`` is told where pages lie."""
        self._pages = pages
        self._known = known

    def publish(
        self, attachment: _native.Attachment, ring: _native.RingTable, call: PageCall, deadline: float
    ) -> Stored:
        """Have the node store what it does not have, the front of the batch last: so it stays if not all can."""
        run = _Run(attachment, ring, call, deadline, self._known)
        there = run.name()
        if there.is_draining or not _is_answered(there):
            return Stored(there, 0, why_unstored(there))
        lengths, is_found = as_locations(there.locations())["length"], there.is_found() == 1
        for page in np.flatnonzero(is_found & (lengths != call.lengths)).tolist():
            raise misfit(page, int(call.lengths[page]), int(lengths[page]))
        run.rows = np.flatnonzero(~is_found)
        if not len(run.rows):
            return Stored(there, 0, {})
        run.unstored["device"] = len(run.rows)
        with ExitStack() as undo:
            undo.callback(run.tell_stored)
            self._pages.lift(call, run.rows, run.store, deadline)
            undo.pop_all()
        return run.end(there)


class _Run:
    """One publish, whose pages come in rounds."""

    def __init__(
        self,
        attachment: _native.Attachment,
        ring: _native.RingTable,
        call: PageCall,
        deadline: float,
        known: _native.LocationCache,
    ) -> None:
        self.rows: NDArray[np.intp] = np.empty(0, np.intp)
        """The pages of the call that are copied: rounds are of these."""
        self.unstored = dict.fromkeys(("no_room", "changed", "timed_out", "host", "device"), 0)
        self._attachment = attachment
        self._ring = ring
        self._call = call
        self._deadline = deadline
        self._known = known
        self._last: _native.AttachedPublish | None = None
        self._n_found = 0
        self._nbytes = 0

    def name(self) -> _native.AttachedPublish:
        """Publish what lies in the pool of the call's pages, without their bytes."""
        left = self._deadline - time.monotonic()
        return self._attachment.publish_again(self._call.ids, left, self._ring, self._known)

    def _confirm(self) -> _native.AttachedPublish:
        """As :meth:`name`, of what lies there now: no further use of these pages."""
        left = self._deadline - time.monotonic()
        return self._attachment.confirm(self._call.ids, left, self._ring, self._known)

    def store(self, round_: Round) -> bool:
        """Have the node pull a round; return whether it would pull another."""
        staged, left = round_.staged, self._deadline - time.monotonic()
        if left <= 0:
            return False
        published = self._attachment.publish(staged.ids, staged.pieces, left, self._ring, self._known)
        if published.misfit is not None:
            page = int(self.rows[round_.rows.start + published.misfit])
            length = int(as_locations(published.locations())["length"][published.misfit])
            raise misfit(page, int(self._call.lengths[page]), length)
        self._last = published
        self._n_found += published.n_found
        self._nbytes += published.stored_bytes
        self.unstored["device"] -= len(staged.ids)
        for reason, n_pages in why_unstored(published).items():
            self.unstored[reason] += n_pages
        if published.is_lost or published.is_draining:
            self.unstored["host"] += self.unstored["device"]
            self.unstored["device"] = 0
            return False
        return True

    def tell_stored(self) -> None:
        """Have the node tell the directory of what it has stored: the call ends without its engine doing so."""
        if self._n_found:
            self._attachment.tell_missed(self._call.ids, _MISSED_S)

    def end(self, there: _native.AttachedPublish) -> Stored:
        """Return what became of all pages; ``there``: those that were there before, as the node has said it."""
        published, last = there, self._last
        if last is not None and len(last.is_found()) == len(self._call.ids):
            published = last  # it was one round of all
        elif last is not None and (self._n_found or last.is_draining):
            # All are named now: a later round of a batch larger than the pool may have evicted pages of one before.
            published = self._confirm()
            if not _is_answered(published):
                self._attachment.tell_missed(self._call.ids, _MISSED_S)
                return Stored(published, self._nbytes, why_unstored(published))
        evicted = there.n_found + self._n_found - published.n_found
        self.unstored["no_room"] += max(0, evicted)
        return Stored(published, self._nbytes, self.unstored)


def why_unstored(published: _native.AttachedPublish) -> dict[str, int]:
    """Return how many pages of a publish are not in the pool, by the reason."""
    return {
        "no_room": published.n_no_room,
        "changed": published.n_changed,
        "timed_out": published.n_late,
        "host": published.n_not_tried,
    }


def _is_answered(named: _native.AttachedPublish) -> bool:
    return named.n_late == 0 and not named.is_lost
