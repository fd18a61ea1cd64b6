"""The line that no exception crosses: beyond it is an engine's scheduler, to which a failure is just a miss."""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from p2pkv.errors import P2PKVError
from p2pkv.limited_log import LimitedLog
from p2pkv.metrics import Metrics

_log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)
P = ParamSpec("P")


class Boundary:
    """Counts what goes wrong, and logs each cause once a minute at most. Thread-safe."""

    def __init__(self, engine: str, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._metrics = metrics
        self._log = LimitedLog(_log, clock=clock)

    def call(self, operation: str, work: Callable[[], T], *, miss: M) -> T | M:
        """Return what ``work`` does, or ``miss`` if it raises. For what is no method; those are :func:`guarded`."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - an exception would end the engine's thread
            self.note(operation, error)
            return miss

    def note(self, operation: str, error: Exception) -> None:
        """Count a failure; log it unless the same was logged within a minute."""
        cause = type(error).__name__
        self._metrics.failed_calls.labels(operation, cause).inc()
        self._metrics.engine_failures.inc()
        self._log.warning(
            (operation, cause, str(error)),
            "%s: %s failed and counts as a miss (p2pkv_failed_calls_total counts them): %s: %s",
            self._engine,
            operation,
            cause,
            error,
            exc_info=None if isinstance(error, P2PKVError) else error,
        )


class Bounded(Protocol):
    """Whose methods can be :func:`guarded`."""

    @property
    def boundary(self) -> Boundary: ...


S = TypeVar("S", bound=Bounded)


class Guard(Protocol[M_co]):
    """Makes a method one that does not raise."""

    def __call__(self, method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T | M_co]: ...


def guarded(operation: str, *, miss: M) -> Guard[M]:
    """Have a method of a :class:`Bounded` return a copy of ``miss`` where it would raise, counted as ``operation``."""

    def guard(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T | M]:
        @functools.wraps(method)
        def guarded_method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T | M:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - an exception would end the engine's thread
                self.boundary.note(operation, error)
                return copy.deepcopy(miss)

        return guarded_method

    return guard
