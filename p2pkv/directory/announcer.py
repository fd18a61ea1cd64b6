"""Keeps the directory true to this node's pool.

Two threads: one takes back the entries of evicted pages, one puts entries again that the cluster has lost or never
got: after a change of the ring those that moved, after an owner missed some those it owns, spread over time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.ring import Ring, moved
from p2pkv.errors import ClosedError
from p2pkv.metrics import Metrics
from p2pkv.pool import Pool
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

_BATCH = 1024
_GATHER_S = 0.01
"""How long evictions are gathered before the directory is told; until then they cost their readers a miss."""
_PAUSE_S = 0.005
"""Between two batches of a repair: 200,000 entries a second at most, so that a change of view is no storm."""
_RETRY_S = 1.0
"""How soon an owner that missed entries is given them again."""
_REQUEST_S = 1.0


class Announcer(Resource):
    """Runs from construction to :meth:`close`; close it before the pool."""

    def __init__(self, pool: Pool, directory: DirectoryClient, metrics: Metrics) -> None:
        self._pool = pool
        self._directory = directory
        self._metrics = metrics
        self._changed = threading.Condition()  # guards what follows
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
        with self._changed:
            self._changed.notify_all()

    def owe(self, node_id: str) -> None:
        """Put again, soon, what this owner should have."""
        with self._changed:
            self._owed.add(node_id)

    def owe_everything(self) -> None:
        """Put every page again: the others had taken this node for dead."""
        with self._changed:
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
        with self._changed:
            return self._closed

    def _retract(self) -> None:
        # A publish into a full pool evicts in every call; told call by call, that would cost it the interpreter.
        keys, locations = self._pool.drain_evicted(_BATCH, 0.5, gather=_GATHER_S)
        if len(keys):
            self._directory.drop(keys, locations, time.monotonic() + _REQUEST_S, by_owner=True)
            self._metrics.retracted_pages.inc(len(keys))

    def _announce(self) -> None:
        with self._changed:
            if self._ring_is_announced() and not self._all_owed:
                self._changed.wait(_RETRY_S)
            if self._closed or (self._ring_is_announced() and not self._all_owed and not self._owed):
                return
            before, everything, owed = self._announced, self._all_owed, self._owed
            self._owed, self._all_owed = set(), False
            now = self._directory.ring
        self._repair(before, now, owed, everything=everything)
        with self._changed:
            self._announced = now

    def _ring_is_announced(self) -> bool:
        return self._announced is self._directory.ring

    def _repair(self, before: Ring, now: Ring, owed: set[str], *, everything: bool) -> None:
        owing = [index for index, member in enumerate(now.members) if member.node_id in owed]
        cursor = 0
        while not self._is_closed():
            keys, locations, cursor = self._pool.list(cursor, _BATCH)
            if len(keys):
                chosen = moved(before, now, keys) | np.isin(now.owners(keys), owing).any(axis=1)
                chosen |= everything
                if chosen.any():
                    self._directory.put(keys[chosen], locations[chosen], time.monotonic() + _REQUEST_S)
                    self._metrics.reannounced_pages.inc(int(chosen.sum()))
            if cursor == 0:
                return
            time.sleep(_PAUSE_S)

    def stop(self) -> None:
        """Begin nothing new, and don't mind if the directory is closed under what has begun."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop both threads; what was not told costs readers a miss. Idempotent."""
        self.stop()
        for thread in self._threads:
            thread.join()
