"""The line that no exception crosses: beyond it is an engine's scheduler, to which a failure is just a miss."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from p2pkv.errors import P2PKVError
from p2pkv.metrics import Metrics

_log = logging.getLogger(__name__)

T = TypeVar("T")


_QUIET_S = 60.0
"""After a line about a cause. What goes on failing is in the log whenever somebody looks, and fills no disk."""


@dataclass(slots=True)
class _Cause:
    quiet_until: float
    n_unsaid: int = 0


class Boundary:
    """Counts what goes wrong, and logs each cause once a minute at most. Thread-safe."""

    def __init__(self, engine: str, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()  # guards _logged
        self._logged: dict[tuple[str, str], _Cause] = {}

    def call(self, operation: str, work: Callable[[], T], *, miss: T) -> T:
        """Return what ``work`` does, or ``miss`` if it raises."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - an exception would end the engine's thread
            self.note(operation, error)
            return miss

    def note(self, operation: str, error: Exception) -> None:
        """Count a failure; log it unless one of its kind was logged within a minute."""
        cause = type(error).__name__
        self._metrics.failed_calls.labels(operation, cause).inc()
        now = self._clock()
        with self._lock:
            known = self._logged.get((operation, cause))
            if known is not None and now < known.quiet_until:
                known.n_unsaid += 1
                return
            self._logged[operation, cause] = _Cause(now + _QUIET_S)
        more = (
            f", as {known.n_unsaid} others did of which nothing was said" if known and known.n_unsaid else ""
        )
        _log.warning(
            "%s: %s failed and counts as a miss%s (p2pkv_failed_calls_total counts them): %s: %s",
            self._engine,
            operation,
            more,
            cause,
            error,
            exc_info=None if isinstance(error, P2PKVError) else error,
        )
