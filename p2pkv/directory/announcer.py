"""Keeps the directory true to this node's pool and disk.

Two threads: one takes back the entries of evicted pages, or says that they lie on disk now; one puts entries again that
the cluster has lost or never got, spread over time:

* after a change of the ring those that moved;
* those that an owner missed, when it answers again;
* those that a reader took out although the page is there, which the reader told this node;
* those for which an owner had no place when they were put, once it has one and says so;
* whatever else was lost: all owners are asked for all entries, slowly, and given what they lack.

:meth:`Announcer.tell_changed` and :meth:`Announcer.step` are one turn of these threads' loops. A simulation calls them
itself, never :meth:`Announcer.start`, and brings the clock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

import numpy as np
from numpy.typing import NDArray

from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.listing import Listing, locate
from p2pkv.directory.membership.timing import Clock, SystemClock
from p2pkv.directory.owed import Due, Owed
from p2pkv.directory.ring import Ring, moved
from p2pkv.disk.tier import DiskTier
from p2pkv.errors import ClosedError
from p2pkv.limited_log import LimitedLog
from p2pkv.metrics import Metrics
from p2pkv.page import Keys, Locations
from p2pkv.pool import Pool
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

_BATCH = 1024
_GATHER_S = 0.01
"""How long evictions are gathered before the directory is told; until then they cost their readers a miss."""
_PAUSE_S = 0.005
"""Between two batches of a repair: 200,000 entries a second at most, so that a change of view is no storm."""
_MOST_LISTED = 8 * _BATCH
"""Pages that one step looks at to find a batch of those that moved: where these are few, as in a large cluster, owners
would else be asked to take a page or two at a time."""
_FULL = _BATCH * 3 // 4
"""Pages that are a batch by then, since ever fewer are looked at as it fills."""
_IDLE_S = 0.5
_MOST_RINGS = 16
"""That pages were put by and the announcer has not caught up with; beyond it everything is put again."""
_RETRY_S = 1.0
"""After an error that nobody expected."""
_REQUEST_S = 1.0
CHECK_S = 600.0
"""How long it takes to ask all owners for all entries once: 24 bytes an entry, 80 KB/s for a million pages."""
_CHECK_BATCH = 256
_CHECK_PAUSE_S = 0.01
"""At least between two of these batches, however many pages there are."""


@dataclass(slots=True)
class _Pass:
    """One pass over all pages, to put again what somebody lacks."""

    listing: Listing
    before: tuple[Ring, ...]
    now: Ring
    everything: bool
    gathered: list[tuple[Keys, Locations]] = field(default_factory=list)
    """Chosen, and not put yet."""
    sequence: int = 0
    """Drawn before the first of them was looked at."""

    def gather(self) -> tuple[Keys, Locations] | None:
        """Choose of the next pages about a batch; return all that is gathered, None if that is nothing."""
        n_listed = 0
        while not self.listing.is_over and n_listed < _MOST_LISTED:
            n_gathered = sum(len(keys) for keys, _ in self.gathered)
            if n_gathered >= _FULL:
                break
            keys, locations = self.listing.batch(_BATCH - n_gathered)
            n_listed += _BATCH - n_gathered
            chosen = self.chooses(keys)
            if chosen.any():
                self.gathered.append((keys[chosen], locations[chosen]))
        if not self.gathered:
            return None
        return (
            np.concatenate([keys for keys, _ in self.gathered]),
            np.concatenate([locations for _, locations in self.gathered]),
        )

    def chooses(self, keys: Keys) -> NDArray[np.bool_]:
        """Return a mask ``(n,)`` of the pages that may not be known to all their owners."""
        chosen = np.full(len(keys), self.everything)
        for ring in self.before:
            chosen |= moved(ring, self.now, keys)
        return chosen


class Announcer(Resource):
    """Runs from :meth:`start` to :meth:`close`, and ends the pool's telling of evictions with it."""

    def __init__(
        self,
        pool: Pool,
        directory: DirectoryClient,
        metrics: Metrics,
        tier: DiskTier | None = None,
        *,
        check_s: float = CHECK_S,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        self._pool = pool
        self._tier = tier
        self._directory = directory
        self._metrics = metrics
        self._check_s = check_s
        self._clock: Clock = clock or SystemClock()
        self._random = random or Random()  # noqa: S311 - jitter, nothing secret
        self._log = LimitedLog(_log)
        # Guards what follows; taken by itself in calls, as in DirectoryChannels.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_silent = False
        self._n_putting = 0  # threads that put entries now
        # Every page has been put by one of these at least, but for what is owed.
        self._rings = [directory.ring]
        self._owed = Owed(self._random)
        self._all_owed = False
        self._is_urgent = False
        self._closed = False
        # Used by the telling thread only: the tier had more to tell than was taken.
        self._is_behind = False
        self.on_announced: Callable[[], None] = lambda: None
        """Called by the announcing thread when every page has been put again, as :meth:`owe_everything` asks for: with
        all who own entries, of whom there are others than this node. After ``check_s`` the debts that a pass has left
        are waited for no more: an owner may have no room, and the other owners of its entries have them."""
        self._announced: float | None = None  # since when, by a pass, which leaves debts
        # Used by the announcing thread only.
        self._pass: _Pass | None = None
        self._mending: tuple[Due, Listing] | None = None  # of all that one node owns
        self._checking: Listing | None = None
        self._next_check = self._clock.monotonic() + check_s * self._random.random()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start both threads."""
        for name, run in (("p2pkv-retract", self._run_telling), ("p2pkv-announce", self._run_steps)):
            self._threads.append(threading.Thread(target=run, name=name, daemon=True))
            self._threads[-1].start()

    def ring_changed(self) -> None:
        """Put again what moved to other owners. To be called after each change, also of one that is undone at once."""
        with self._lock:
            ring = self._directory.ring
            if len(self._rings) > _MOST_RINGS:
                self._all_owed = True
            elif not ring.is_like(self._rings[-1]):
                self._rings.append(ring)
        self._hurry()

    def owe(self, node_id: str, keys: Keys) -> None:
        """Put again, soon, what this owner has missed."""
        with self._lock:
            self._owed.add(node_id, keys, self._clock.monotonic())

    def owe_everything(self) -> None:
        """Put every page again: the others had taken this node for dead."""
        with self._lock:
            self._all_owed = True
        self._hurry()

    def fall_silent(self, until: float) -> None:
        """Put no page from now on: others have them, and this node is about to leave.

        Blocks until what is being put has been answered, but not beyond ``until``, a time of the clock: a put that is
        on its way when its entry is dropped would bring that back.
        """
        with self._lock:
            self._is_silent = True
            self._changed.wait_for(lambda: self._n_putting == 0, max(0.0, until - self._clock.monotonic()))

    @contextmanager
    def _may_put(self) -> Iterator[bool]:
        """Say whether entries may be put in this block; :meth:`fall_silent` waits for its end."""
        with self._lock:
            may_put = not self._is_silent
            self._n_putting += may_put
        try:
            yield may_put
        finally:
            with self._lock:
                self._n_putting -= may_put
                if self._is_silent:
                    self._changed.notify_all()

    def _hurry(self) -> None:
        with self._lock:
            self._is_urgent = True
            self._changed.notify_all()

    def _run_telling(self) -> None:
        # A publish into a full pool evicts in every call; told call by call, that would cost it the interpreter.
        while not self._is_closed():
            self._try(self.tell_changed)

    def _run_steps(self) -> None:
        wait = 0.0
        while not self._is_closed():
            with self._lock:
                if not self._is_urgent and not self._closed:
                    self._changed.wait(wait)
                self._is_urgent = False
            wait = self._try(self.step) or 0.0

    def _try(self, turn: Callable[[], float | None]) -> float | None:
        """Take one turn; what can't be told now is told again."""
        try:
            return turn()
        except ClosedError:
            with self._lock:
                self._closed = True
        except Exception as error:  # noqa: BLE001  # the top of a thread's loop
            message = "the directory was not told of a change; trying again"
            self._log.error(type(error).__name__, message, exc_info=error)
            with self._lock:
                self._changed.wait_for(lambda: self._closed, _RETRY_S)
        return None

    def _is_closed(self) -> bool:
        with self._lock:
            return self._closed

    # what left the pool, or came to the disk

    def tell_changed(self, idle: float | None = None, gather: float = _GATHER_S) -> None:
        """Tell the directory of evicted pages; wait for them at most ``idle`` seconds, then ``gather`` for more."""
        if self._tier is None:
            keys, locations = self._pool.drain_evicted(
                _BATCH, _IDLE_S if idle is None else idle, gather=gather
            )
            self._metrics.working_set.left(keys)
            if len(keys):
                self._directory.drop(keys, locations, self._deadline(), by_owner=True)
                self._metrics.retracted_pages.inc(len(keys))
            return
        if self._is_behind:
            idle = gather = 0.0
        # the tier wakes it too
        evicted, _ = self._pool.drain_evicted(_BATCH, _IDLE_S if idle is None else idle, gather=gather)
        self._metrics.working_set.left(evicted)
        changed = self._tier.drain_changed(_BATCH)
        self._is_behind = len(changed) >= _BATCH
        self._tell(np.concatenate([evicted, changed]))

    def _tell(self, keys: Keys) -> None:
        """Say where pages are now, or that they are nowhere.

        Looked up now, not when they changed: a page that goes back and forth ends as what it was seen to be last.
        """
        if not len(keys):
            return
        sequence = self._directory.next_sequence()
        there, locations = locate(self._pool, self._tier, keys)
        if there.any():
            with self._may_put() as may_put:
                if may_put:
                    self._directory.put(keys[there], locations[there], self._deadline(), sequence=sequence)
        if not there.all():
            self._directory.drop_gone(keys[~there], self._deadline(), sequence=sequence)
            self._metrics.retracted_pages.inc(int(np.count_nonzero(~there)))

    def _deadline(self) -> float:
        return self._clock.monotonic() + _REQUEST_S

    # what the others lack

    def step(self) -> float:
        """Put again one batch at most of what is lacking; return how many seconds the next step may wait."""
        with self._may_put() as may_put:
            return self._step() if may_put else _IDLE_S

    def _step(self) -> float:
        self._directory.call_spare_holders(_BATCH, self._deadline())
        doubted = self._directory.take_doubted(_BATCH)
        if len(doubted):
            self._mend(doubted)
            return _PAUSE_S
        if self._pass is None:
            self._pass = self._next_pass()
        if self._pass is not None:
            self._advance(self._pass)
            return _PAUSE_S
        now = self._clock.monotonic()
        with self._lock:
            due = self._owed.due(now)
        if due is not None:
            self._pay(due)
            return _PAUSE_S
        self._say_announced()
        if now >= self._next_check:
            self._check()
        with self._lock:
            owed = self._owed.next_due()
        soon = min(self._next_check, now + _IDLE_S if owed is None else owed)
        return max(_PAUSE_S, min(soon - self._clock.monotonic(), _IDLE_S))

    def _say_announced(self) -> None:
        if self._announced is None or len(self._directory.ring.members) < 2:
            return
        is_over = self._clock.monotonic() >= self._announced + self._check_s
        with self._lock:
            is_owed = self._all_owed or (self._owed.next_due() is not None and not is_over)
        if not is_owed:
            self._announced = None
            self.on_announced()

    def _next_pass(self) -> _Pass | None:
        now = self._directory.ring
        with self._lock:
            everything, before = self._all_owed, tuple(self._rings)
            if all(ring.is_like(now) for ring in before) and not everything:
                self._rings = [now]
                return None
            self._all_owed = False
            self._rings.append(now)
            self._owed.keep({member.node_id for member in now.members})
        return _Pass(Listing(self._pool, self._tier), before, now, everything)

    def _advance(self, lacking: _Pass) -> None:
        if not lacking.gathered:
            lacking.sequence = self._directory.next_sequence()
        batch = lacking.gather()
        if batch is not None:
            keys, locations = batch
            self._directory.put(keys, locations, self._deadline(), sequence=lacking.sequence)
            self._metrics.reannounced_pages.inc(len(keys))
            lacking.gathered.clear()
        if lacking.listing.is_over:
            with self._lock:
                self._rings = self._rings[len(lacking.before) :]
            self._pass = None
            if lacking.everything:
                self._announced = self._clock.monotonic()

    def _pay(self, due: Due) -> None:
        """Give an owner what it has missed: some keys, or all that is its own."""
        if all(member.node_id != due.node_id for member in self._directory.ring.members):
            is_paid = True  # it is gone, and what it had has moved
        elif due.keys is not None:
            is_paid = self._mend(due.keys, due.node_id)
        else:
            if self._mending is None or self._mending[0] != due:
                self._mending = (due, Listing(self._pool, self._tier))
            is_paid = self._mend_batch(self._mending[1], _BATCH, due.node_id)
            if is_paid and not self._mending[1].is_over:
                return
            self._mending = None
        with self._lock:
            if is_paid:
                self._owed.paid(due)
            else:
                self._owed.missed(due.node_id, self._clock.monotonic())

    def _check(self) -> None:
        """Ask all owners for the next few entries, and put what they lack."""
        if self._checking is None:
            self._checking = Listing(self._pool, self._tier)
        self._mend_batch(self._checking, _CHECK_BATCH)
        if self._checking.is_over:
            self._checking = None
        n_pages = max(self._pool.stats()["pages"], _CHECK_BATCH)
        pause = self._check_s * _CHECK_BATCH / n_pages * self._random.uniform(0.9, 1.1)
        self._next_check = self._clock.monotonic() + max(pause, _CHECK_PAUSE_S)

    def _mend(self, keys: Keys, node_id: str | None = None) -> bool:
        """Have the owners of these pages' entries, or one of them, know where they are.

        That they are gone is said to one only: to it nobody else has said so.
        """
        sequence = self._directory.next_sequence()
        there, locations = locate(self._pool, self._tier, keys)
        is_told = self._tell_lacking(keys[there], locations[there], sequence, node_id)
        if node_id is not None and not there.all():
            gone = keys[~there]
            is_told &= self._directory.drop_gone(gone, self._deadline(), sequence=sequence, node_id=node_id)
        return is_told

    def _mend_batch(self, listing: Listing, limit: int, node_id: str | None = None) -> bool:
        sequence = self._directory.next_sequence()
        return self._tell_lacking(*listing.batch(limit), sequence, node_id)

    def _tell_lacking(self, keys: Keys, locations: Locations, sequence: int, node_id: str | None) -> bool:
        if not len(keys):
            return True
        mended = self._directory.mender.mend(
            keys, locations, self._deadline(), sequence=sequence, node_id=node_id
        )
        self._metrics.mended_entries.inc(mended.n_put)
        return bool(mended.is_known.all())

    def stop(self) -> None:
        """Begin nothing new, and don't mind if the directory is closed under what has begun."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._pool.close()  # wakes the thread that waits for evictions; the pages stay where they are

    def close(self) -> None:
        """Stop both threads; what was not told costs readers a miss. Idempotent."""
        self.stop()
        for thread in self._threads:
            thread.join()
