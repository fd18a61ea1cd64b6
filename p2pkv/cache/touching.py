"""Tells the owners of pages that were read here that they were, so that their pools keep what others use.

A page that is pulled leaves no trace in its owner's pool. What is read is noted natively
(``native/src/cache/touches.h``); a thread passes it on, four times a second at most, over channels that are there.
What an owner can't be told now, for all of them are lent, it is told with the next round or never.
"""

from __future__ import annotations

import logging
import threading

from p2pkv import _native
from p2pkv.directory.client import DirectoryClient
from p2pkv.limited_log import LimitedLog
from p2pkv.metrics import Metrics
from p2pkv.page import Keys
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

_PACE_S = 0.25
"""Between two rounds, for each of which 4,096 reads are kept: 256 KiB a second at most, and less than a pool takes to
be filled anew. A page that is read again within a round is told once."""
_IDLE_S = 3600.0
"""How long a wait for a first read takes before it begins anew; any time will do."""


class Touching(Resource):
    """Tells them from :meth:`start` to :meth:`close`, in a thread that sleeps while nothing is read from others."""

    def __init__(self, touches: _native.Touches, directory: DirectoryClient, metrics: Metrics) -> None:
        self._touches = touches
        self._directory = directory
        self._metrics = metrics
        self._log = LimitedLog(_log)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        # Used by who calls `turn`: what owners could not be told in the turn before.
        self._untold: list[tuple[int, int, Keys]] = []

    def start(self) -> None:
        """Begin to tell."""
        self._thread = threading.Thread(target=self._run, name="p2pkv-touches", daemon=True)
        self._thread.start()

    def turn(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for reads, and tell their owners of those since the last turn.

        What could not be told in the last turn is told first, and not waited for.
        """
        untold, self._untold = self._untold, []
        for owner, boot, keys in untold:
            self._tell(owner, boot, keys)
        for owner, boot, keys in self._touches.drain(0.0 if untold else timeout):
            n_told = self._tell(owner, boot, keys)
            if n_told < len(keys):
                self._untold.append((owner, boot, keys[n_told:]))

    def _tell(self, owner: int, boot: int, keys: Keys) -> int:
        n_told = self._directory.touch(owner, boot, keys)
        self._metrics.told_touches.inc(n_told)
        return n_told

    def close(self) -> None:
        """Tell no more; waits for the thread. Idempotent."""
        self._closing.set()
        self._touches.close()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.turn(_IDLE_S)
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop
                self._log.error(type(error).__name__, "owners were not told what was read", exc_info=error)
            self._closing.wait(_PACE_S)
