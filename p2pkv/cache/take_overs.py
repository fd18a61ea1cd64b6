"""The side that takes pages over from a node that is about to leave (:mod:`p2pkv.cache.drain`).

They come as guests of that node, so that all that holds for guests holds while it still may take them back. When it
lets go of them they are this node's own. What makes room for them is bounded: beyond what is free, pages of one leaver
take the place of a share of this pool that is no more than one node's of all, those that were used longest ago.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.cache.prefetch import PrefetchOutcome
from p2pkv.cache.prefetcher import Prefetcher
from p2pkv.control.questions import QuestionServer
from p2pkv.control.wire import LET_GO, TAKE_OVER, TAKE_OVER_ENTRY, U32, U64, Kind
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.view import Member
from p2pkv.disk.tier import DiskTier
from p2pkv.errors import ClosedError, ControlError, UsageError
from p2pkv.metrics import Metrics
from p2pkv.page import Keys, Locations, Namespace, as_bytes
from p2pkv.pool import Pool
from p2pkv.transports.base import Resource

_LONGEST_S = 10.0
"""What one request may take, whatever it says: the thread that answers is one."""
_BATCH = 1024
_PUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Receiver:
    """What the answers of a node that takes over are made of."""

    pool: Pool
    tier: DiskTier | None
    guests: _native.Guests
    prefetcher: Prefetcher
    directory: DirectoryClient
    namespace: Namespace
    epoch: Callable[[], int]
    """Returns that of this node's namespace."""
    members: Callable[[], Mapping[int, Member]]
    """Returns those in the view, but for this node, by their keys."""
    is_draining: Callable[[], bool]
    metrics: Metrics


class _Taken:
    """The pages of one leaver in the order in which they came, which is from those used last to those used first."""

    def __init__(self) -> None:
        self._batches: list[Keys] = []
        self._n = self._n_touched = 0
        self.nbytes = 0
        """They took so many of the pool when they came."""

    def add(self, ids: Keys, nbytes: int) -> bool:
        """Remember more of them; whether they are twice as many as when they were put in order last."""
        self._batches.append(ids)
        self.nbytes += nbytes
        self._n += len(ids)
        return self._n >= 2 * self._n_touched

    def in_order_of_use(self) -> Keys:
        """Return all, those used last at the front, as a pool is told of a use."""
        self._n_touched = self._n
        return np.concatenate(self._batches)


class TakeOvers(Resource):
    """Answers TAKE_OVER and LET_GO, in a thread each that runs from construction to :meth:`close`."""

    def __init__(self, loop: _native.ControlLoop, receiver: Receiver) -> None:
        self._receiver = receiver
        self._lock = threading.Lock()  # guards the next one
        # Bytes that the pages of a leaver, by its key and boot, may still take the place of.
        self._replaceable: dict[tuple[int, int], int] = {}
        self._taken: dict[tuple[int, int], _Taken] = {}  # used by the two threads below, under the lock
        self._servers: list[QuestionServer] = []
        with ExitStack() as undo:
            undo.callback(self.close)  # of the first, where the second has no thread
            for kind, answer in ((Kind.TAKE_OVER, self._take_over), (Kind.LET_GO, self._let_go)):
                self._servers.append(QuestionServer(loop, kind, answer))
            undo.pop_all()

    def _take_over(self, body: bytes) -> bytes:
        """Bring what is offered; answer how many bytes more would find room, and what became of each page."""
        receiver = self._receiver
        if len(body) < TAKE_OVER.size or (len(body) - TAKE_OVER.size) % TAKE_OVER_ENTRY.itemsize:
            raise ControlError("a take-over of a wrong length")
        prefix, source, boot, milliseconds, may_replace = TAKE_OVER.unpack_from(body)
        epoch = receiver.epoch()  # before the prefix: a bump between the two is noticed when pages are stored
        if prefix != receiver.namespace.prefix:
            raise UsageError("its pages are of another namespace, or of another epoch of it")
        if receiver.is_draining():
            raise UsageError("it is about to leave as well")
        entries = np.frombuffer(body, TAKE_OVER_ENTRY, offset=TAKE_OVER.size)
        ids = np.ascontiguousarray(entries["key"])
        if len(ids) and _native.find_duplicate(ids) is not None:
            raise ControlError("a take-over names a page twice")
        until = time.monotonic() + min(milliseconds / 1000, _LONGEST_S)
        leaver = (source, boot)
        try:
            outcomes = self._bring(
                leaver, ids, entries["location"], epoch, until, may_replace=bool(may_replace)
            )
        except ClosedError as error:
            raise UsageError("it is being closed") from error
        return U64.pack(self._free()) + U64.pack(self._may_replace(leaver)) + outcomes.tobytes()

    def _bring(
        self,
        leaver: tuple[int, int],
        ids: Keys,
        locations: Locations,
        epoch: int,
        until: float,
        *,
        may_replace: bool,
    ) -> NDArray[np.uint8]:
        receiver = self._receiver
        outcomes = np.full(len(ids), PrefetchOutcome.NO_ROOM, np.uint8)
        if not len(ids):
            return outcomes
        free = self._free()
        found, _ = receiver.pool.lookup(ids)
        sizes = np.where(found.astype(bool), 0, receiver.pool.block_nbytes(locations["length"]))
        room = free + (self._may_replace(leaver) if may_replace else 0)
        chosen = np.flatnonzero(np.cumsum(sizes) <= room)
        if not len(chosen):
            return outcomes
        raw = as_bytes(locations[chosen])
        prefetch = receiver.prefetcher.take_over(ids[chosen], raw, epoch, until)
        prefetch.wait(max(0.0, until - time.monotonic()))
        prefetch.close()  # the rest may go to others; what is being read comes still
        outcomes[chosen] = prefetch.outcomes
        is_brought = outcomes == PrefetchOutcome.BROUGHT
        taken = int(sizes[is_brought].sum())
        with self._lock:
            self._replaceable[leaver] = self._replaceable.get(leaver, 0) - max(0, taken - free)
            here = self._taken.setdefault(leaver, _Taken())
            is_due = here.add(ids[is_brought], taken)
        if is_due:
            self._put_in_order(here)
        return outcomes

    def _put_in_order(self, taken: _Taken) -> None:
        """Have what its node used last go last here too: it came first, and would be the first to go for the rest."""
        with self._lock:
            ids = taken.in_order_of_use()
        self._receiver.pool.native.touch(ids)

    def _free(self) -> int:
        stats = self._receiver.pool.stats()
        return max(0, stats["capacity"] - stats["used"])

    def _may_replace(self, leaver: tuple[int, int]) -> int:
        """Return how many bytes of pages that are here may go for those of a leaver, which are none of its own."""
        used = self._receiver.pool.stats()["used"]
        members = self._receiver.members()
        present = {(member.key, member.boot_epoch) for member in members.values()}
        # Those with a pool, this one and the leaver among them: all of the cluster that its pages are shared out over.
        n_pools = 1 + sum(member.weight > 0 or member.is_draining for member in members.values())
        with self._lock:
            self._replaceable = {who: left for who, left in self._replaceable.items() if who in present}
            self._taken = {who: taken for who, taken in self._taken.items() if who in present}
            if leaver not in self._replaceable and leaver in present:
                self._replaceable[leaver] = self._receiver.pool.largest_page // n_pools
            own = self._taken[leaver].nbytes if leaver in self._taken else 0
            return max(0, min(self._replaceable.get(leaver, 0), used - own))

    def _let_go(self, body: bytes) -> bytes:
        """Take the guests of a leaver for own pages; answer how many there were."""
        if len(body) != LET_GO.size:
            raise ControlError("a let-go of a wrong length")
        source, log, number = LET_GO.unpack(body)
        keys = self._receiver.guests.adopt(source, log, number)
        self._receiver.prefetcher.on_asked_for(keys)
        with self._lock:  # others may be in the middle of theirs
            taken = [self._taken.pop(leaver) for leaver in list(self._taken) if leaver[0] == source]
        for one in taken:
            self._put_in_order(one)
        self._receiver.metrics.adopted_pages.inc(len(keys))
        if self._receiver.tier is not None:
            for first in range(0, len(keys), _BATCH):
                self._note_own(self._receiver.tier, np.ascontiguousarray(keys[first : first + _BATCH]))
        return U32.pack(len(keys))

    def _note_own(self, tier: DiskTier, ids: Keys) -> None:
        """Have the disk know of pages that are own ones now, and readers know that it does."""
        tier.note_published(ids)
        sequence = self._receiver.directory.next_sequence()
        found, locations = self._receiver.pool.lookup(ids)
        there = found.astype(bool)
        if there.any():
            until = time.monotonic() + _PUT_S
            self._receiver.directory.put(ids[there], locations[there], until, sequence=sequence)

    def close(self) -> None:
        """Answer no more; waits for the threads. Idempotent."""
        for server in self._servers:
            server.close()
