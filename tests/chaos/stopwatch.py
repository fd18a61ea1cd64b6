"""How long a call took, and how long its thread waited for a processor meanwhile."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_SCHEDSTAT = "/proc/thread-self/schedstat"
_HAS_SCHEDSTAT = os.path.exists(_SCHEDSTAT)


class _Mine(threading.local):
    """Open from a thread's first call to its end: a process that is short of descriptors could not open it."""

    def __init__(self) -> None:
        self.descriptor = os.open(_SCHEDSTAT, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.descriptor)


_mine = _Mine() if _HAS_SCHEDSTAT else None


class Stopwatch:
    """``with Stopwatch() as watch: call()``, then ``**watch.span`` for the journal: begin, end, and seconds waited."""

    def __enter__(self) -> Self:
        self._waited = _waited()
        self._began = time.monotonic()
        return self

    def __exit__(self, *exc_info: object) -> None:
        ended = time.monotonic()
        self.span = {"b": self._began, "e": ended, "w": round(_waited() - self._waited, 4)}


def _waited() -> float:
    """Return for how many seconds this thread could have run, and others did."""
    return int(os.pread(_mine.descriptor, 100, 0).split()[1]) / 1e9 if _mine is not None else 0.0
