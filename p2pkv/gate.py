"""Lets a node close while calls are under way: no call enters afterwards, and memory goes when the last has left."""

from __future__ import annotations

import threading

from p2pkv.errors import ClosedError


class Gate:
    """``with gate:`` around every call. Thread-safe."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._why = f"{what} is closed"
        self._changed = threading.Condition()  # guards both below
        self._inside = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                raise ClosedError(self._why)
            self._inside += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._closed and not self._inside:
                self._changed.notify_all()

    def shut(self) -> bool:
        """Refuse new calls; False if it was shut already."""
        with self._changed:
            was_open = not self._closed
            self._closed = True
            return was_open

    def forked(self) -> None:
        """Refuse all calls: this is a child of the process whose gate it was, and has none of its threads."""
        self._changed = threading.Condition()  # the old one may be held by a thread that is not here
        self._inside = 0
        self._closed = True
        self._why = f"{self._what} belongs to the process that was forked; start another one here"

    def drain(self) -> None:
        """Block until the last call has left. Every call has a deadline, so this ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._inside)
