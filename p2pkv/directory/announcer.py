"""Keeps the directory true to this node's pool and disk.

Two threads: one takes back the entries of evicted pages, or says that they lie on disk now; one puts entries again that
the cluster has lost or never got: after a change of the ring those that moved, after an owner missed some those it
owns, spread over time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.ring import Ring, moved
from p2pkv.disk.tier import DiskTier
from p2pkv.errors import ClosedError
from p2pkv.metrics import Metrics
from p2pkv.page import RESIDENT, Keys, Locations
from p2pkv.pool import Pool
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

_BATCH = 1024
_GATHER_S = 0.01
"""How long evictions are gathered before the directory is told; until then they cost their readers a miss."""
_PAUSE_S = 0.005
"""Between two batches of a repair: 200,000 entries a second at most, so that a change of view is no storm."""
_IDLE_S = 0.5
_DISK_IDLE_S = 0.05
"""The same with a disk tier: how long a change on disk waits for the directory's hearing of it."""
_RETRY_S = 1.0
"""How soon an owner that missed entries is given them again."""
_REQUEST_S = 1.0


class Announcer(Resource):
    """Runs from construction to :meth:`close`, and ends the pool's telling of evictions with it."""

    def __init__(
        self, pool: Pool, directory: DirectoryClient, metrics: Metrics, tier: DiskTier | None = None
    ) -> None:
        self._pool = pool
        self._tier = tier
        self._directory = directory
        self._metrics = metrics
        # Guards what follows; taken by itself in calls, as in DirectoryChannels.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._announced = directory.ring  # every page has been put by this ring, but for what is owed
        self._owed: set[str] = set()  # node ids of owners that missed entries
        self._all_owed = False
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(step,), name=name, daemon=True)
            for name, step in (("p2pkv-retract", self._retract), ("p2pkv-announce", self._announce))
        ]
        for thread in self._threads:
            thread.start()

    def ring_changed(self) -> None:
        """Put again what moved to other owners."""
        with self._lock:
            self._changed.notify_all()

    def owe(self, node_id: str) -> None:
        """Put again, soon, what this owner should have."""
        with self._lock:
            self._owed.add(node_id)

    def owe_everything(self) -> None:
        """Put every page again: the others had taken this node for dead."""
        with self._lock:
            self._all_owed = True
            self._changed.notify_all()

    def _run(self, step: Callable[[], None]) -> None:
        while not self._is_closed():
            try:
                step()
            except ClosedError:
                return
            except Exception:  # noqa: BLE001  # the top of a thread's loop: what is not told now is told again
                _log.exception("the directory was not told of a change; trying again")
                time.sleep(_RETRY_S)

    def _is_closed(self) -> bool:
        with self._lock:
            return self._closed

    def _retract(self) -> None:
        # A publish into a full pool evicts in every call; told call by call, that would cost it the interpreter.
        if self._tier is None:
            keys, locations = self._pool.drain_evicted(_BATCH, _IDLE_S, gather=_GATHER_S)
            if len(keys):
                self._drop(keys, locations)
            return
        changed = self._tier.drain_changed(_BATCH)
        keys, locations = self._pool.drain_evicted(
            _BATCH, 0 if len(changed) else _DISK_IDLE_S, gather=0 if len(changed) else _GATHER_S
        )
        self._tell(self._tier, keys, locations)
        self._tell(self._tier, changed, self._tier.on_disk(len(changed)))

    def _tell(self, tier: DiskTier, keys: Keys, before: Locations) -> None:
        """Say where pages are now, or take back where they were ``before``.

        Looked up now, not when they changed: a page that goes back and forth ends as what it was seen to be last.
        """
        if len(keys):
            found, locations = tier.locate(keys)
            there = found.astype(bool)
            if there.any():
                self._directory.put(keys[there], locations[there], time.monotonic() + _REQUEST_S)
            if not there.all():
                self._drop(keys[~there], before[~there])

    def _drop(self, keys: Keys, locations: Locations) -> None:
        self._directory.drop(keys, locations, time.monotonic() + _REQUEST_S, by_owner=True)
        self._metrics.retracted_pages.inc(len(keys))

    def _announce(self) -> None:
        with self._lock:
            if self._ring_is_announced() and not self._all_owed:
                self._changed.wait(_RETRY_S)
            if self._closed or (self._ring_is_announced() and not self._all_owed and not self._owed):
                return
            before, everything, owed = self._announced, self._all_owed, self._owed
            self._owed, self._all_owed = set(), False
            now = self._directory.ring
        self._repair(before, now, owed, everything=everything)
        with self._lock:
            self._announced = now

    def _ring_is_announced(self) -> bool:
        return self._announced is self._directory.ring

    def _repair(self, before: Ring, now: Ring, owed: set[str], *, everything: bool) -> None:
        owing = [index for index, member in enumerate(now.members) if member.node_id in owed]
        for keys, locations in self._all_pages():
            if len(keys):
                chosen = moved(before, now, keys) | np.isin(now.owners(keys), owing).any(axis=1)
                chosen |= everything
                if chosen.any():
                    self._directory.put(keys[chosen], locations[chosen], time.monotonic() + _REQUEST_S)
                    self._metrics.reannounced_pages.inc(int(chosen.sum()))
            time.sleep(_PAUSE_S)

    def _all_pages(self) -> Iterator[tuple[Keys, Locations]]:
        """Yield what there is, a batch at a time: first the pool's pages, then those on disk only."""
        cursor = 0
        while not self._is_closed():
            keys, locations, cursor = self._pool.list(cursor, _BATCH)
            yield keys, locations
            if cursor == 0:
                break
        while self._tier is not None and not self._is_closed():
            keys, cursor = self._tier.list(cursor, _BATCH)
            found, locations = self._tier.locate(keys)
            cold = found.astype(bool) & (locations["flags"] & RESIDENT == 0)
            yield keys[cold], locations[cold]
            if cursor == 0:
                return

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
