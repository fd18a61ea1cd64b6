"""Pages of others that calls here fetch often come into this node's own pool, and go again when they have cooled.

They are guests (:mod:`p2pkv.cache.guests`) like those of a prefetch, so that what their owner takes back, or a bump
ends, goes here as well; only that nobody has asked for them. The sketch of hot pages says which they are, the
prefetcher brings them while nothing else waits, and this is what decides: how hot a page has to be, how many bytes a
second may come, and how much of the pool they may have together. No call waits for any of it.

Engines that are attached to this node say what their calls find (``p2pkv/attach/finding.py``), and that counts as well:
:mod:`p2pkv.cache.hot_readers` has what one of them may cost the others.

A thread looks once a second, and seldomer where that takes long: with dozens of engines that find thousands of pages
the interpreter has some tenths of a second to do. Who asks for a page by a prefetch or a pin has it for good: it is no
hot guest any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from p2pkv import _native
from p2pkv.cache.hot_readers import EngineFinds, Finds, HotPages, Parts, collect
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
_MOST_OF_A_CORE = 0.05
"""What the thread may use of a processor, and so of the interpreter that the node's other threads need. A guess."""
_SKETCH_S = 20.0
"""What the sketch of hot pages looks back at most."""
_BRING_S = 10.0
"""What one round of pages may take."""
_REST_S, _LONGEST_REST_S = 10.0, 300.0
"""For so long a page that could not be brought is left alone: the first time, and in the end."""
_NEED_NO_REST = (PrefetchOutcome.BROUGHT, PrefetchOutcome.PRESENT, PrefetchOutcome.CANCELED)
_STAYS_SO = (PrefetchOutcome.NO_ROOM, PrefetchOutcome.NOT_OWNED)
"""What most likely becomes of a page the next time as well, so that it rests twice as long each time."""


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


Touch = Callable[[int, int, Keys], int]
"""Tells the node of this key and boot that its pages are used; returns of how many it was told."""


@dataclass(frozen=True, slots=True)
class _Guest:
    generation: int
    nbytes: int
    source: int


@dataclass(frozen=True, slots=True)
class _Round:
    """Pages that are being brought together."""

    prefetch: Prefetch
    keys: frozenset[bytes]
    room: int
    """Bytes that they may fill."""
    is_hurried: bool
    """Whether it was too little time that bounded their bytes, and not the share: the next round has as many again."""


@dataclass(frozen=True, slots=True)
class _Rest:
    until: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What hot guests are found, brought, kept and let go with."""

    pool: Pool
    tier: DiskTier | None
    guests: _native.Guests
    prefetcher: Prefetcher
    hot_pages: HotPages
    engine_finds: EngineFinds
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
        self._left: dict[bytes, _Rest] = {}  # hot pages that were not brought, and until when they are left
        self._epoch, self._blind_until = around.epoch(), 0.0
        # Guards what follows; reentrant, since a signal's handler may pin pages wherever a thread is.
        self._lock = threading.RLock()
        self._guests: dict[bytes, _Guest] = {}
        self._bringing: _Round | None = None  # changed in turns only
        self._asked_for: set[bytes] = set()  # of those that are being brought, since they were chosen
        self._n_found_by_engines = 0
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
        """Take those of these pages that are hot guests for such no more: somebody has asked for them, or has them."""
        with self._lock:
            if not self._guests and self._bringing is None:
                return
            keys = list(map(bytes, ids))
            for key in keys:
                self._guests.pop(key, None)
            if self._bringing is not None:
                self._asked_for |= self._bringing.keys.intersection(keys)

    def turn(self) -> None:
        """Take note of what has come and gone, let go of what has cooled, and have more brought.

        Raises :class:`~p2pkv.errors.ClosedError` once the node is being closed.
        """
        with self._turning:
            now, limits = self._clock(), self._limits
            self._take_in(now)
            self._forget_gone()
            finds = self._collect()
            self._let_go([key for key in self._guests if finds.rate(key) < limits.cool_rate])
            self._touch_owners()
            grown = self._budget + (now - self._budgeted) * limits.bytes_a_second
            self._budget, self._budgeted = min(float(limits.bytes_a_second), grown), now
            if self._may_bring(now):
                self._bring(finds, now)

    def readings(self) -> dict[str, float]:
        """Return what there is, by the names of the metrics, as of the last turn."""
        with self._lock:
            guests = list(self._guests.values())
        return {
            "p2pkv_attach_found_pages": self._n_found_by_engines,
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
                self._bringing.prefetch.close()

    # --- a turn, with `_turning`

    def _collect(self) -> Finds:
        around, limits = self._around, self._limits
        finds = collect(
            around.hot_pages,
            around.engine_finds,
            least_looks=limits.least_looks,
            least_rate=limits.cool_rate,
        )
        self._n_found_by_engines = finds.n_by_engines
        return finds

    def _may_bring(self, now: float) -> bool:
        epoch = self._around.epoch()
        if epoch != self._epoch:
            # What was fetched before a bump has other ids than what is fetched after it, and the sketch has both.
            self._epoch, self._blind_until = epoch, now + _SKETCH_S
        return self._bringing is None and now >= self._blind_until and not self._around.is_draining()

    def _take_in(self, now: float) -> None:
        """Take note of pages that have been brought since."""
        bringing = self._bringing
        if bringing is None:
            return
        prefetch = bringing.prefetch
        if time.monotonic() >= prefetch.deadline:
            prefetch.close()  # it may never have its turn, while one prefetch comes after the other
        if not prefetch.done():
            return
        n_filled = bringing.room - prefetch.room
        self._budget -= n_filled
        for row, outcome in enumerate(prefetch.outcomes.tolist()):
            is_next = outcome == PrefetchOutcome.NO_ROOM and bringing.is_hurried and n_filled > 0
            if outcome not in _NEED_NO_REST and not is_next:
                self._have_rest(bytes(prefetch.ids[row]), outcome in _STAYS_SO, now)
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

    def _have_rest(self, key: bytes, is_longer: bool, now: float) -> None:
        before = self._left.get(key)
        seconds = _REST_S if before is None or not is_longer else min(2 * before.seconds, _LONGEST_REST_S)
        self._left[key] = _Rest(now + seconds, seconds)

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

    def _bring(self, finds: Finds, now: float) -> None:
        # Those that have cooled are forgotten, so that they are no more than the sketches have places.
        cool_rate = self._limits.cool_rate
        self._left = {key: rest for key, rest in self._left.items() if finds.rate(key) >= cool_rate}
        hot = self._wanted(finds, now)
        if not hot:
            return
        nbytes, smallest, largest = self._blocks()
        parts = self._parts(finds)
        hot = parts.in_turn(hot, largest)
        if nbytes + largest > self._room:
            most = max(0, int(self._budget // largest))
            going, coming = parts.make_room(hot, self._room - nbytes, largest, most)
            self._let_go(going)
            hot = list(dict.fromkeys([*coming, *hot]))  # none but these has room that others have left
            nbytes, _, _ = self._blocks()
        room = int(min(self._budget, self._room - nbytes))
        # What is left of a share that is full is no room: nothing would be looked up but for that to be found out.
        keys = hot[: max(0, room // smallest)]
        self._counting.settled(PrefetchOutcome.NO_ROOM, len(hot) - len(keys))
        if not keys:
            return
        with self._lock:  # who asks for one of them from now on is heard of
            prefetch = self._around.prefetcher.bring_hot(
                _ids(keys), self._epoch, time.monotonic() + _BRING_S, room, self._counting
            )
            if prefetch is not None:
                is_hurried = self._budget < self._room - nbytes
                self._bringing = _Round(prefetch, frozenset(keys), room, is_hurried)

    def _parts(self, finds: Finds) -> Parts:
        with self._lock:
            guests = {key: guest.nbytes for key, guest in self._guests.items()}
        return Parts(finds, guests, self._room)

    def _blocks(self) -> tuple[int, int, int]:
        """Return the bytes of all blocks of hot guests, and of the smallest and the largest of them.

        While there are none these two are of a page of a single byte: nobody knows how long pages are before they come.
        """
        with self._lock:
            blocks = [guest.nbytes for guest in self._guests.values()]
        least = self._around.pool.granule
        return sum(blocks), min(blocks, default=least), max(blocks, default=least)

    def _wanted(self, finds: Finds, now: float) -> list[bytes]:
        """Return the hot pages that are neither here nor left alone, in their readers' turns."""
        hot = [
            key
            for key in finds.hot(self._limits.hot_rate)
            if (rest := self._left.get(key)) is None or rest.until <= now
        ]
        if not hot:
            return []
        ids = _ids(hot)
        is_here, _ = self._around.pool.lookup(ids)
        if self._around.tier is not None:
            is_here |= self._around.tier.contains(ids)
        return [key for key, here in zip(hot, is_here.tolist(), strict=True) if not here]

    def _run(self) -> None:
        pause_s = _TURN_S
        while not self._closing.wait(pause_s):
            began = time.thread_time()
            try:
                self.turn()
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop
                self._log.error(type(error).__name__, "hot pages were not looked at", exc_info=error)
            pause_s = pause_after(time.thread_time() - began)


def pause_after(used_s: float) -> float:
    """Return for how many seconds the thread rests after a turn that has used ``used_s`` of a processor."""
    return max(_TURN_S, used_s / _MOST_OF_A_CORE)


def _ids(keys: list[bytes]) -> Keys:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
