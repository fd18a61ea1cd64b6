"""Pages of others that calls here fetch often come into this node's own pool, and go again when they have cooled.

They are guests (:mod:`p2pkv.cache.guests`) like those of a prefetch, so that what their owner takes back, or a bump
ends, goes here as well; only that nobody has asked for them. The sketch of hot pages says which they are, the
prefetcher brings them while nothing else waits, and this is what decides: how hot a page has to be, how many bytes a
second may come, and how much of the pool they may have together. No call waits for any of it.

A thread looks once a second. Who asks for a page by a prefetch or a pin has it for good: it is no hot guest any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from p2pkv import _native
from p2pkv.cache.prefetch import Counting, Prefetch, PrefetchOutcome
from p2pkv.cache.prefetcher import Prefetcher
from p2pkv.directory.view import Member
from p2pkv.disk.tier import DiskTier
from p2pkv.errors import ClosedError
from p2pkv.limited_log import LimitedLog
from p2pkv.metrics import Metrics
from p2pkv.page import KEY_BYTES, Keys
from p2pkv.pool import Pool
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

_TURN_S = 1.0
_MUCH_HOTTER = 2.0
"""Where the share is full, a page takes the place of one that is so many times less hot."""
_SKETCH_S = 20.0
"""What the sketch of hot pages looks back at most."""
_MOST = 2048
"""Pages that the sketch may name: all of its two windows."""
_BRING_S = 10.0
"""What one round of pages may take."""
_RETRY_S = 10.0
"""For so long a page that could not be brought is left alone."""
_NEED_NO_REST = (PrefetchOutcome.BROUGHT, PrefetchOutcome.PRESENT, PrefetchOutcome.NO_ROOM)


@dataclass(frozen=True, slots=True)
class Limits:
    """Which pages come and go, and how fast."""

    hot_rate: float = 0.5
    """Finds a second that make a page hot: five to ten of them, over the time that the sketch looks back. A guess; a
    page that is brought was read once more, so that two finds later it has paid."""
    cool_rate: float = 0.25
    """Below so many a second a guest goes. It is half of the above: what is near it does not come and go."""
    least_looks: int = 4
    """Of a busy node's fetches a sample is looked at: a page that is seen fewer times is not taken for hot."""
    bytes_a_second: int = 128 << 20
    """What may come: a tenth of a network of 10 Gbit/s, and of a processor as much. A guess; not tuned. A page that is
    longer does not come."""


HotPages = Callable[[int, int], list[tuple[bytes, float]]]
"""Returns the pages that calls find most often, at most so many and each seen so many times, with finds a second."""
Touch = Callable[[int, int, Keys], int]
"""Tells the node of this key and boot that its pages are used; returns of how many it was told."""


@dataclass(frozen=True, slots=True)
class _Guest:
    generation: int
    nbytes: int
    source: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What hot guests are found, brought, kept and let go with."""

    pool: Pool
    tier: DiskTier | None
    guests: _native.Guests
    prefetcher: Prefetcher
    hot_pages: HotPages
    touch: Touch | None
    """None: owners do not hear of what is used here."""
    members: Callable[[], Mapping[int, Member]]
    """Returns those in the view, but for this node, by their keys."""
    epoch: Callable[[], int]
    """Returns that of this node's namespace."""
    is_draining: Callable[[], bool]
    metrics: Metrics


class HotGuests(Resource):
    """Thread-safe. Looks in a thread from :meth:`start` to :meth:`close`; :meth:`turn` is one look."""

    def __init__(
        self,
        around: Surroundings,
        room: int,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``room``: bytes of the pool that they may have together."""
        self._around = around
        self._room = room
        self._limits = limits or Limits()
        self._clock = clock
        self._log = LimitedLog(_log)
        self._turning = threading.Lock()  # is held for a turn, and guards what follows
        self._budget, self._budgeted = float(self._limits.bytes_a_second), clock()
        self._left: dict[bytes, float] = {}  # pages that were not brought, and until when they are left alone
        self._epoch, self._blind_until = around.epoch(), 0.0
        # Guards what follows; reentrant, since a signal's handler may pin pages wherever a thread is.
        self._lock = threading.RLock()
        self._guests: dict[bytes, _Guest] = {}
        # What is under way, and the bytes that it may fill; it is changed in turns only.
        self._bringing: tuple[Prefetch, int] | None = None
        self._asked_for: set[bytes] = set()  # since those that are being brought were chosen
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        metrics = around.metrics
        self._counting = Counting(
            lambda outcome, n: metrics.count(metrics.hot_pages, outcome.name.lower(), n),
            lambda nbytes: metrics.hot_bytes.inc(nbytes),
        )

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._run, name="p2pkv-hot-guests", daemon=True)
        self._thread.start()

    def asked_for(self, ids: Keys) -> None:
        """Take those of these pages that are hot guests for guests that somebody has asked for."""
        with self._lock:
            if not self._guests and self._bringing is None:
                return
            keys = list(map(bytes, ids))
            for key in keys:
                self._guests.pop(key, None)
            if self._bringing is not None:
                self._asked_for.update(keys)

    def turn(self) -> None:
        """Take note of what has come and gone, let go of what has cooled, and have more brought.

        Raises :class:`~p2pkv.errors.ClosedError` once the node is being closed.
        """
        with self._turning:
            now, limits = self._clock(), self._limits
            self._take_in(now)
            self._forget_gone()
            rates = dict(self._around.hot_pages(_MOST, 1))
            self._let_go([key for key in self._guests if rates.get(key, 0.0) < limits.cool_rate])
            self._touch_owners()
            grown = self._budget + (now - self._budgeted) * limits.bytes_a_second
            self._budget, self._budgeted = min(float(limits.bytes_a_second), grown), now
            if self._may_bring(now):
                self._bring(rates, now)

    def readings(self) -> dict[str, float]:
        """Return what there is, by the names of the metrics, as of the last turn."""
        with self._lock:
            guests = list(self._guests.values())
        return {
            "p2pkv_hot_guest_pages": len(guests),
            "p2pkv_hot_guest_bytes": sum(guest.nbytes for guest in guests),
        }

    def close(self) -> None:
        """Look no more; waits for the thread, and takes nothing out. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        with self._turning:
            if self._bringing is not None:
                self._bringing[0].close()

    # --- a turn, with `_turning`

    def _may_bring(self, now: float) -> bool:
        epoch = self._around.epoch()
        if epoch != self._epoch:
            # What was fetched before a bump has other ids than what is fetched after it, and the sketch has both.
            self._epoch, self._blind_until = epoch, now + _SKETCH_S
        return self._bringing is None and now >= self._blind_until and not self._around.is_draining()

    def _take_in(self, now: float) -> None:
        """Take note of pages that have been brought since."""
        if self._bringing is None or not self._bringing[0].done():
            return
        prefetch, room = self._bringing
        self._budget -= room - prefetch.room
        for row, outcome in enumerate(prefetch.outcomes.tolist()):
            if outcome not in _NEED_NO_REST:
                self._left[bytes(prefetch.ids[row])] = now + _RETRY_S
        # Those without a source came back from this node's own disk, and are its own.
        rows = np.flatnonzero(prefetch.sources)
        ids = np.ascontiguousarray(prefetch.ids[rows])
        found, where = self._around.pool.lookup(ids)
        blocks = self._around.pool.block_nbytes(where["length"])
        with self._lock:
            for index in np.flatnonzero(found).tolist():
                key = bytes(ids[index])
                if key in self._asked_for:
                    continue
                source = int(prefetch.sources[rows[index]])
                self._guests[key] = _Guest(int(where["generation"][index]), int(blocks[index]), source)
            self._asked_for.clear()
            self._bringing = None

    def _forget_gone(self) -> None:
        """Forget what was evicted or taken back, or published over."""
        with self._lock:
            keys = list(self._guests)
            if not keys:
                return
            found, where = self._around.pool.lookup(_ids(keys))
            for key, is_there, generation in zip(
                keys, found.tolist(), where["generation"].tolist(), strict=True
            ):
                if not is_there or generation != self._guests[key].generation:
                    del self._guests[key]

    def _let_go(self, keys: list[bytes]) -> None:
        """Take hot guests out of the pool, unless somebody has asked for them meanwhile."""
        with self._lock:  # held beyond the call: who asks for one from now on does not find it
            mine = [key for key in keys if self._guests.pop(key, None) is not None]
            if mine:
                self._around.metrics.cooled_guests.inc(self._around.guests.evict(_ids(mine)))

    def _touch_owners(self) -> None:
        """Tell owners of the guests, all of which are in use: calls here read them from the owners no more."""
        if self._around.touch is None:
            return
        members = self._around.members()
        with self._lock:
            by_source: dict[int, list[bytes]] = {}
            for key, guest in self._guests.items():
                by_source.setdefault(guest.source, []).append(key)
        for source, keys in by_source.items():
            if (member := members.get(source)) is not None:
                n_told = self._around.touch(source, member.boot_epoch, _ids(keys))
                self._around.metrics.told_touches.inc(n_told)

    def _bring(self, rates: dict[bytes, float], now: float) -> None:
        self._left = {key: until for key, until in self._left.items() if until > now}
        hot = self._wanted()
        if not hot:
            return
        with self._lock:
            nbytes = sum(guest.nbytes for guest in self._guests.values())
            largest = max((guest.nbytes for guest in self._guests.values()), default=0)
        if nbytes + largest > self._room:
            self._make_room([rate for _, rate in hot], rates)
            with self._lock:
                nbytes = sum(guest.nbytes for guest in self._guests.values())
        room = int(min(self._budget, self._room - nbytes))
        if room <= 0:
            self._counting.settled(PrefetchOutcome.NO_ROOM, len(hot))
            return
        ids = _ids([key for key, _ in hot])
        with self._lock:  # who asks for one of them from now on is heard of
            prefetch = self._around.prefetcher.bring_hot(
                ids, self._epoch, time.monotonic() + _BRING_S, room, self._counting
            )
            self._bringing = None if prefetch is None else (prefetch, room)

    def _wanted(self) -> list[tuple[bytes, float]]:
        """Return the hot pages that are neither here nor left alone, the hottest first, with finds a second."""
        hot = [
            (key, rate)
            for key, rate in self._around.hot_pages(_MOST, self._limits.least_looks)
            if rate >= self._limits.hot_rate and key not in self._left
        ]
        if not hot:
            return []
        ids = _ids([key for key, _ in hot])
        is_here, _ = self._around.pool.lookup(ids)
        if self._around.tier is not None:
            is_here |= self._around.tier.contains(ids)
        return [page for page, here in zip(hot, is_here.tolist(), strict=True) if not here]

    def _make_room(self, wanted: list[float], rates: dict[bytes, float]) -> None:
        """Let those guests go that are much less hot than pages which are not here: the least against the most."""
        with self._lock:
            coolest_first = sorted(self._guests, key=partial(_rate, rates))
        going = []
        for key, rate in zip(coolest_first, wanted, strict=False):
            if rate < _MUCH_HOTTER * rates.get(key, 0.0):
                break
            going.append(key)
        self._let_go(going)

    def _run(self) -> None:
        while not self._closing.wait(_TURN_S):
            try:
                self.turn()
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop
                self._log.error(type(error).__name__, "hot pages were not looked at", exc_info=error)


def _ids(keys: list[bytes]) -> Keys:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)


def _rate(rates: dict[bytes, float], key: bytes) -> float:
    return rates.get(key, 0.0)
