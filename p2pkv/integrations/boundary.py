"""The line that no exception crosses: beyond it is an engine's scheduler, to which a failure is just a miss."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from p2pkv.errors import P2PKVError
from p2pkv.metrics import Metrics

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Boundary:
    """Counts what goes wrong, and logs it once a cause. Thread-safe."""

    def __init__(self, engine: str, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._lock = threading.Lock()  # guards _logged
        self._logged: set[tuple[str, str]] = set()

    def call(self, operation: str, work: Callable[[], T], *, miss: T) -> T:
        """Return what ``work`` does, or ``miss`` if it raises."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - an exception would end the engine's thread
            self.note(operation, error)
            return miss

    def note(self, operation: str, error: Exception) -> None:
        """Count a failure; log it if it is the first of its kind."""
        cause = type(error).__name__
        self._metrics.failed_calls.labels(operation, cause).inc()
        with self._lock:
            if (operation, cause) in self._logged:
                return
            self._logged.add((operation, cause))
        _log.warning(
            "%s: %s failed and counts as a miss, as will others of this cause, without a word but in "
            "p2pkv_failed_calls_total: %s: %s",
            self._engine,
            operation,
            cause,
            error,
            exc_info=None if isinstance(error, P2PKVError) else error,
        )
