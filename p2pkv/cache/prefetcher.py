"""Brings pages that others have into this node's pool, behind its callers' backs.

One thread brings them, a bounded batch at a time, and follows their owners (:mod:`p2pkv.cache.guests`), so that what is
taken back there goes here as well. What it stores is announced: others read it here from then on.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.cache.guests import Sources, StoreStatus, Word
from p2pkv.cache.prefetch import Counting, Prefetch, PrefetchOutcome
from p2pkv.directory.client import DirectoryClient, Lease
from p2pkv.disk.tier import DiskTier
from p2pkv.errors import ClosedError, P2PKVError, UsageError
from p2pkv.limited_log import LimitedLog
from p2pkv.memory.registered import Memory
from p2pkv.metrics import Metrics
from p2pkv.page import LOCATION, RESIDENT, Keys, Outcomes, Pieces, as_locations
from p2pkv.pool import Pool

_log = logging.getLogger(__name__)

_BATCH = 64
"""Pages that are looked up and read together: few enough that what is urgent is not behind them for long."""
_STAGING = 8 << 20
"""Bytes of memory that pages are read into on their way, and of the pool that is reserved for them: an eighth of it at
most, so that what is published finds room. More if a single page is longer."""
_BATCH_S, _HOT_BATCH_S = 5.0, 0.5
"""What a batch may take of its prefetch's time; one that nobody asked for holds up what somebody does."""
_LOOK_UP_SHARE, _PROMOTE_SHARE = 0.2, 0.5
"""Of a batch's time that is left: for the directory, and for owners' disks."""
_POLL_S = 1.0
"""How often those whose guests are here are asked whether something was missed."""
_POLL_ANSWER_S = 0.3
_MOST_WAITING, _MOST_PAGES = 256, 1 << 18
"""Prefetches, and pages of them, that may wait; a guess. What is beyond them is refused."""
_BY_STORE = {
    StoreStatus.STORED: PrefetchOutcome.BROUGHT,
    StoreStatus.EXISTS: PrefetchOutcome.PRESENT,
    StoreStatus.NO_ROOM: PrefetchOutcome.NO_ROOM,
    StoreStatus.TAKEN_BACK: PrefetchOutcome.TAKEN_BACK,
    StoreStatus.CHANGED: PrefetchOutcome.NOT_READ,
}


class ReadLocated(Protocol):
    """Reads pages from where they are said to lie, and from nowhere else: ``PageCache.read_located``."""

    def __call__(self, ids: Keys, pages: Pieces, raw: NDArray[np.uint8], deadline: float) -> Outcomes: ...


class Prefetcher:
    """Thread-safe. Its thread starts with the first prefetch and runs until :meth:`close`."""

    def __init__(
        self,
        *,
        pool: Pool,
        tier: DiskTier | None,
        own_key: int,
        native: _native.Guests,
        sources: Sources,
        directory: DirectoryClient,
        read: ReadLocated,
        register: Callable[[NDArray[np.uint8]], Memory],
        room: int,
        metrics: Metrics,
        others: _native.OtherHolders | None,
    ) -> None:
        """``room``: bytes of blocks that one prefetch may fill; ``register`` makes memory that ``read`` can write.

        ``others``: where look-ups put other holders of pages; None: pages are brought from the first one or not at all.
        """
        self._pool = pool
        self._tier = tier
        self._own_key = own_key
        self._native = native
        self._sources = sources
        self._directory = directory
        self._read = read
        self._register = register
        self._room = room
        self._batch_nbytes = min(_STAGING, pool.largest_page // 8)
        self._others = others
        # It must not lead back to this one: what a closed node had open goes with its last reference.
        self._counting = Counting(
            lambda outcome, n: metrics.count(metrics.prefetched_pages, outcome.name.lower(), n),
            lambda nbytes: metrics.prefetched_bytes.inc(nbytes),
        )
        self.on_asked_for: Callable[[Keys], None] = lambda _: None
        """Called with pages that somebody wants to have here, before they are looked for, or that are own ones now."""
        self._log = LimitedLog(_log)
        # Guards what follows; reentrant, since a signal's handler may close the node wherever a thread is.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[Prefetch] = deque()
        self._hot: Prefetch | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        # Used by the thread only.
        self._staging: NDArray[np.uint8] | None = None
        self._memory: Memory | None = None

    def submit(self, ids: Keys, epoch: int, deadline: float) -> Prefetch:
        """Have pages brought that were hashed in ``epoch``; those that wait already come first. Never blocks."""
        prefetch = Prefetch(ids, epoch, deadline, self._room, self._counting)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the node is closed")
            n_pages = sum(len(waiting.ids) for waiting in self._waiting)
            if len(self._waiting) < _MOST_WAITING and n_pages + len(ids) <= _MOST_PAGES and self._start():
                self._waiting.append(prefetch)
                self._changed.notify_all()
                return prefetch
        prefetch.settle_rest(PrefetchOutcome.REFUSED)
        return prefetch

    def take_over(self, ids: Keys, raw: NDArray[np.uint8], epoch: int, deadline: float) -> Prefetch:
        """Have pages brought from where they are said to lie, before all that waits: their owner is about to leave.

        Raises :class:`~p2pkv.errors.UsageError` where no thread is to be had that would bring them.
        """
        nbytes = int(self._pool.block_nbytes(as_locations(raw)["length"]).sum())
        prefetch = Prefetch(ids, epoch, deadline, nbytes, self._counting, raw)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the node is closed")
            if not self._start():
                raise UsageError("it has no thread to bring pages with")
            self._waiting.appendleft(prefetch)
            self._changed.notify_all()
        return prefetch

    def bring_hot(
        self, ids: Keys, epoch: int, deadline: float, room: int, counting: Counting
    ) -> Prefetch | None:
        """Have pages brought that nobody has asked for, while nothing else waits; None while others of that kind do.

        None as well where no thread is to be had that would bring them.
        """
        prefetch = Prefetch(ids, epoch, deadline, room, counting, is_asked_for=False)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the node is closed")
            if (self._hot is not None and not self._hot.is_taken) or not self._start():
                return None
            self._hot = prefetch
            self._changed.notify_all()
        return prefetch

    def _start(self) -> bool:
        """With the lock: whether there is a thread that brings pages; the next call tries once more."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="p2pkv-prefetch", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._log.warning("start", "pages are not brought into the pool: %s", error)
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        next_poll, has_sources = time.monotonic(), False
        while not self._is_closed:
            try:
                if time.monotonic() >= next_poll:
                    has_sources = self._sources.poll(time.monotonic() + _POLL_ANSWER_S) > 0
                    next_poll = time.monotonic() + _POLL_S
                if (prefetch := self._next(next_poll if has_sources else None)) is not None:
                    has_sources = True  # the next poll says whether it is so
                    self._bring(prefetch)
            except ClosedError:
                break
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop
                self._log.error(type(error).__name__, "pages were not brought into the pool", exc_info=error)

    def _next(self, until: float | None) -> Prefetch | None:
        """Return the first prefetch that has rows to take; wait for one, but not beyond ``until``."""
        with self._lock:
            while self._waiting and self._waiting[0].is_taken:
                self._waiting.popleft()
            if self._hot is not None and self._hot.is_taken:
                self._hot = None
            if not self._waiting and self._hot is None and not self._is_closed:
                self._changed.wait(None if until is None else max(0.0, until - time.monotonic()))
            return self._waiting[0] if self._waiting else self._hot

    # --- one batch

    def _bring(self, prefetch: Prefetch) -> None:
        """Bring the next few pages of a prefetch; whatever happens, each of them has an outcome."""
        now = time.monotonic()
        if now >= prefetch.deadline:
            prefetch.settle_rest(PrefetchOutcome.TIMED_OUT)
            return
        rows = prefetch.take(_BATCH)
        try:
            until = min(prefetch.deadline, now + (_BATCH_S if prefetch.is_asked_for else _HOT_BATCH_S))
            left = self._find_here(prefetch, rows, until)
            if len(left):
                self._bring_from_peers(prefetch, left, until)
        except ClosedError:
            prefetch.settle(rows, PrefetchOutcome.CANCELED)
            raise
        except P2PKVError as error:
            self._log.warning(type(error).__name__, "pages were not brought into the pool: %s", error)
        finally:
            prefetch.settle(rows, PrefetchOutcome.NOT_READ)

    def _find_here(self, prefetch: Prefetch, rows: NDArray[np.int64], until: float) -> NDArray[np.int64]:
        """Settle pages of this node's own pool and disk; return the other rows."""
        if prefetch.is_asked_for:
            self.on_asked_for(prefetch.ids[rows])
        found, _ = self._pool.lookup(prefetch.ids[rows])
        there = found.astype(bool)
        self._pool.native.touch(prefetch.ids[rows[there]])
        prefetch.settle(rows[there], PrefetchOutcome.PRESENT)
        rows = rows[~there]
        if self._tier is None or not len(rows):
            return rows
        on_disk = self._tier.contains(prefetch.ids[rows]).astype(bool)
        if not on_disk.any():
            return rows
        cold = rows[on_disk]
        seconds = max(0.0, until - time.monotonic()) * _PROMOTE_SHARE
        is_back = self._tier.native.promote(prefetch.ids[cold], seconds).astype(bool)
        prefetch.settle(cold[is_back], PrefetchOutcome.BROUGHT)
        return np.setdiff1d(rows, cold[is_back])  # what this node's disk did not bring, another's may

    def _bring_from_peers(self, prefetch: Prefetch, rows: NDArray[np.int64], until: float) -> None:
        if prefetch.located is not None:
            raw = np.ascontiguousarray(prefetch.located[rows])
            left = self._bring_located(prefetch, rows, raw, until)
            prefetch.settle(left, PrefetchOutcome.NOT_OWNED)
            return
        now = time.monotonic()
        found, raw = self._directory.get(prefetch.ids[rows], now + (until - now) * _LOOK_UP_SHARE)
        there = found.astype(bool) & (as_locations(raw)["owner"] != self._own_key)
        prefetch.settle(rows[~there], PrefetchOutcome.NOT_FOUND)
        rows, raw = rows[there], np.ascontiguousarray(raw[there])
        is_cold = as_locations(raw)["flags"] & RESIDENT == 0
        if not is_cold.any():
            self._bring_from_others(prefetch, self._bring_located(prefetch, rows, raw, until), until)
            return
        asked = np.ascontiguousarray(raw[is_cold])
        lease = Lease(max(0.0, until - time.monotonic()), secrets.randbits(64))
        try:
            is_back, where = self._promote(prefetch.ids[rows[is_cold]], asked, until, lease)
            raw[is_cold] = where
            is_resident = ~is_cold
            is_resident[is_cold] = is_back
            prefetch.settle(rows[~is_resident], PrefetchOutcome.NOT_READ)
            raw = np.ascontiguousarray(raw[is_resident])
            left = self._bring_located(prefetch, rows[is_resident], raw, until)
            self._bring_from_others(prefetch, left, until)
        finally:
            self._directory.release(lease, asked)

    def _bring_from_others(self, prefetch: Prefetch, rows: NDArray[np.int64], until: float) -> None:
        """Bring pages whose first holder does not own them from whoever else the directory has named."""
        others = {row: self._others_of(prefetch.ids[row : row + 1]) for row in rows.tolist()}
        while len(rows):
            is_known = np.array([bool(others[row]) for row in rows.tolist()])
            prefetch.settle(rows[~is_known], PrefetchOutcome.NOT_OWNED)
            rows = rows[is_known]
            raw = np.array([others[row].pop(0) for row in rows.tolist()], np.uint8)
            rows = self._bring_located(prefetch, rows, raw.reshape(-1, LOCATION.itemsize), until)

    def _others_of(self, key: Keys) -> list[NDArray[np.uint8]]:
        if self._others is None:
            return []
        raw = self._others.of(key)
        locations = as_locations(raw)
        is_good = (locations["flags"] & RESIDENT != 0) & (locations["owner"] != self._own_key)
        return list(raw[is_good])

    def _promote(
        self, ids: Keys, raw: NDArray[np.uint8], until: float, lease: Lease
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
        """Have owners bring pages back from their disks; return which are there then, and where."""
        seconds = max(0.0, until - time.monotonic()) * _PROMOTE_SHARE
        found, where = self._directory.promote(
            ids, raw, time.monotonic() + seconds, answer_s=seconds * 0.8, lease=lease
        )
        return found.astype(bool), where

    def _bring_located(
        self, prefetch: Prefetch, rows: NDArray[np.int64], raw: NDArray[np.uint8], until: float
    ) -> NDArray[np.int64]:
        """Bring pages from their owners; return the rows of those that lie there as guests, or no more."""
        locations = as_locations(raw)
        # Before anything is read: what is taken back from here on is heard of here.
        words = self._sources.follow(prefetch.ids[rows], locations, until) if len(rows) else {}
        has_answered = np.isin(locations["owner"], np.array(list(words), np.uint64))
        prefetch.settle(rows[~has_answered], PrefetchOutcome.NOT_READ)
        is_own = np.zeros(len(rows), bool)
        for owner, word in words.items():
            is_own[locations["owner"] == owner] = word.is_own
        for part in self._parts(prefetch, rows, locations["length"], np.flatnonzero(is_own)):
            if time.monotonic() >= until:
                prefetch.settle(rows[is_own], PrefetchOutcome.TIMED_OUT)
                break
            self._read_and_store(prefetch, rows[part], np.ascontiguousarray(raw[part]), words, until)
        return rows[has_answered & ~is_own]

    def _parts(
        self,
        prefetch: Prefetch,
        rows: NDArray[np.int64],
        lengths: NDArray[np.uint64],
        chosen: NDArray[np.int64],
    ) -> Iterator[NDArray[np.int64]]:
        """Yield those chosen that this prefetch still may bring, as many at a time as fit the staging memory."""
        part: list[int] = []
        nbytes = 0
        blocks = self._pool.block_nbytes(lengths)
        for index in chosen.tolist():
            length = int(lengths[index])
            if length == 0:  # no page is empty: whoever says so is wrong
                prefetch.settle(rows[index : index + 1], PrefetchOutcome.NOT_READ)
                continue
            block = int(blocks[index])
            if block > prefetch.room or length > self._pool.largest_page:
                prefetch.settle(rows[index : index + 1], PrefetchOutcome.NO_ROOM)
                continue
            prefetch.room -= block
            if part and nbytes + length > self._batch_nbytes:
                yield np.array(part)
                part, nbytes = [], 0
            part.append(index)
            nbytes += length
        if part:
            yield np.array(part)

    def _read_and_store(
        self,
        prefetch: Prefetch,
        rows: NDArray[np.int64],
        raw: NDArray[np.uint8],
        words: dict[int, Word],
        until: float,
    ) -> None:
        locations = as_locations(raw)
        lengths = locations["length"].astype(np.int64)
        ends = np.cumsum(lengths)
        addresses = self._stage(int(ends[-1])) + ends - lengths
        pieces = Pieces(np.stack([addresses, lengths], axis=1).reshape(-1, 1, 2))
        is_read = self._read(prefetch.ids[rows], pieces, raw, until).astype(bool)
        prefetch.settle(rows[~is_read], PrefetchOutcome.NOT_READ)
        rows = rows[is_read]
        if not len(rows):
            return
        owners = locations["owner"][is_read].tolist()
        origins = np.array([(owner, words[owner].log, words[owner].number) for owner in owners], np.uint64)
        ids = prefetch.ids[rows]
        statuses, where = self._native.store(
            ids, addresses[is_read], origins, np.ascontiguousarray(raw[is_read]), prefetch.epoch
        )
        is_stored = statuses == StoreStatus.STORED
        if is_stored.any():
            stored = as_locations(np.ascontiguousarray(where[is_stored]))
            sources = locations["owner"][is_read][is_stored]
            # before they are announced, which may raise: they are there, and fill what they fill
            prefetch.note_stored(rows[is_stored], sources, int(stored["length"].sum()))
            self._directory.put(ids[is_stored], stored, until)
        for status, outcome in _BY_STORE.items():
            prefetch.settle(rows[statuses == status], outcome)

    def _stage(self, nbytes: int) -> int:
        """Return the address of so many bytes that pages can be read into."""
        if self._staging is None or self._staging.nbytes < nbytes:
            if self._memory is not None:
                self._memory.close()
            # where memory or its registration can't be had the next batch tries again
            self._memory = self._staging = None
            staging = np.zeros(max(nbytes, self._batch_nbytes), np.uint8)
            self._memory = self._register(staging)
            self._staging = staging
        return int(self._staging.ctypes.data)

    @property
    def n_waiting(self) -> int:
        """How many prefetches wait or are under way."""
        with self._lock:
            return len(self._waiting)

    def stop(self) -> None:
        """Bring no more; what waits is canceled. Never blocks."""
        with self._lock:
            self._is_closed = True
            waiting = [*self._waiting, *([] if self._hot is None else [self._hot])]
            self._changed.notify_all()
        for prefetch in waiting:
            prefetch.close()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        if self._memory is not None:
            self._memory.close()
