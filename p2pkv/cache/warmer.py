"""Has the owners of pages that lie on disk begin to load them, when it seems that they will be fetched soon.

A look-up that finds pages on their owners' disks says so here; a thread passes it on. Nobody waits for it, and what
comes faster than it can be passed on is dropped: a page that was not warmed is promoted when it is fetched.
"""

from __future__ import annotations

import logging
import threading
import time
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from p2pkv.directory.client import DirectoryClient, Lease
from p2pkv.errors import P2PKVError
from p2pkv.page import RESIDENT, Keys, as_locations

_log = logging.getLogger(__name__)

_WAITING = 16
"""Look-ups; more than a few mean that the owners can't keep up anyway."""
_REQUEST_S = 0.1


class Warmer:
    """Thread-safe. Its thread starts with the first page; close it before the directory's client."""

    def __init__(self, directory: DirectoryClient, own_key: int) -> None:
        self._directory = directory
        self._own_key = own_key
        # a queue with a bound of its own has locks that an exception of a signal's handler leaves locked
        self._waiting: SimpleQueue[tuple[Keys, NDArray[np.uint8]] | None] = SimpleQueue()
        self._starting = threading.Lock()  # guards the two below
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def warm(self, keys: Keys, raw: NDArray[np.uint8]) -> None:
        """Warm those of the located pages that lie on a peer's disk. Never waits."""
        locations = as_locations(raw)
        is_cold = locations["flags"] & RESIDENT == 0
        if not is_cold.any():
            return
        is_cold &= locations["owner"] != self._own_key
        if not is_cold.any():
            return
        if self._waiting.qsize() >= _WAITING:
            return
        self._waiting.put((keys[is_cold], raw[is_cold]))
        with self._starting:
            if self._thread is None and not self._is_closed:
                thread = threading.Thread(target=self._run, name="p2pkv-warm", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return  # no thread is to be had now: the next call tries once more
                self._thread = thread

    def _run(self) -> None:
        while (cold := self._waiting.get()) is not None:
            keys, raw = cold
            try:
                self._directory.promote(
                    keys, raw, time.monotonic() + _REQUEST_S, answer_s=0, lease=Lease(0.0)
                )
            except P2PKVError as error:
                _log.debug("pages were not warmed: %s", error)

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        with self._starting:
            self._is_closed = True
            thread = self._thread
        if thread is not None:
            self._waiting.put(None)
            thread.join()
