"""A logger that says each cause once a minute at most: what goes on failing is in the log, and fills no disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

QUIET_S = 60.0
"""After a line about a cause. What goes on failing is in the log whenever somebody looks."""
MAX_CAUSES = 64
"""So many are told apart at a time; further ones count as one cause. Somebody may think of ever new ones."""
_OTHERS = object()


@dataclass(slots=True)
class _Cause:
    quiet_until: float
    n_unsaid: int = 0


class LimitedLog:
    """Logs through ``log`` each cause once in :data:`QUIET_S`, and says then how often it was left out. Thread-safe.

    One for each part of a node, so that one node's silence is not another's.
    """

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        # guards _causes; reentrant, since a signal's handler may log wherever a thread is
        self._lock = threading.RLock()
        self._causes: dict[Hashable, _Cause] = {}

    def warning(
        self, cause: Hashable, message: str, *values: object, exc_info: BaseException | None = None
    ) -> None:
        """Log ``message % values`` with the trace of ``exc_info``, unless a line about ``cause`` came a moment ago."""
        self._say(logging.WARNING, cause, message, values, exc_info)

    def error(
        self, cause: Hashable, message: str, *values: object, exc_info: BaseException | None = None
    ) -> None:
        """Log an error as :meth:`warning` does a warning."""
        self._say(logging.ERROR, cause, message, values, exc_info)

    def _say(
        self,
        level: int,
        cause: Hashable,
        message: str,
        values: tuple[object, ...],
        exc_info: BaseException | None,
    ) -> None:
        n_unsaid = self._count(cause)
        if n_unsaid is None:
            return
        if n_unsaid:
            message, values = (
                f"{message} (and %d more of the kind since the last such line)",
                (*values, n_unsaid),
            )
        self._log.log(level, message, *values, exc_info=exc_info, stacklevel=3)  # the place is the caller's

    def _count(self, cause: Hashable) -> int | None:
        """Return how many lines about a cause were left out, or None if this one is."""
        now = self._clock()
        with self._lock:
            if cause not in self._causes and len(self._causes) >= MAX_CAUSES:
                self._causes = {c: known for c, known in self._causes.items() if now < known.quiet_until}
                if len(self._causes) >= MAX_CAUSES:
                    cause = _OTHERS
            known = self._causes.get(cause)
            if known is not None and now < known.quiet_until:
                known.n_unsaid += 1
                return None
            self._causes[cause] = _Cause(now + QUIET_S)
            return known.n_unsaid if known else 0
