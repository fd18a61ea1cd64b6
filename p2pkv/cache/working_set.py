"""Looks from time to time at which pages are in the pool, for the estimate of what more memory would give.

One member of a cluster, whoever it is, brings the estimates of all together once a minute.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from p2pkv.errors import ClosedError
from p2pkv.limited_log import LimitedLog
from p2pkv.metrics.working_set import Share, WorkingSet, together
from p2pkv.page import Keys
from p2pkv.pool import Pool
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

_TURN_S = 10.0
_TURNS_OF_ALL = 6
"""Turns from one look at the whole cluster to the next: its members tell 16 KiB each for it."""
_BATCH = 4096
_REST_S = 0.005
"""Between two batches, each of which takes 0.1 to 0.5 ms: a pass over a million pages takes seconds, and no core."""

Counted = Callable[[], tuple[float, float]]
"""How many pages were published here so far, and how many calls found."""
Gather = Callable[[], Sequence[Share] | None]
"""Brings what the other members have; None if another one does."""


class WorkingSetWatch(Resource):
    """Looks every ten seconds, in a thread from :meth:`start` to :meth:`close`; :meth:`turn` is one look."""

    def __init__(self, working_set: WorkingSet, pool: Pool, counted: Counted) -> None:
        self._working_set = working_set
        self._pool = pool
        self._counted = counted
        self._log = LimitedLog(_log)
        self._turning = (
            threading.Lock()
        )  # held for a turn: a slow one must not undo what a later one has found
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._told = (0.0, 0.0)
        self._readings = working_set.readings(0.0, 0.0)
        self._of_all = together([])
        self.gather: Gather = lambda: None

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._run, name="p2pkv-working-set", daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Look at all pages that are there, and estimate anew. What is counted comes first: nothing is, unseen."""
        with self._turning:
            counted = self._counted()
            self._working_set.look(self._listed(), lambda: self._closing.wait(_REST_S))
            self._told, self._readings = counted, self._working_set.readings(*counted)

    def turn_of_all(self) -> None:
        """Estimate anew for the whole cluster, if that is this member's to do; blocks while the others are asked.

        Raises :class:`~p2pkv.errors.ClosedError` while the node is closed.
        """
        others = self.gather()
        self._of_all = together([] if others is None else [self.share(), *others])

    def share(self) -> Share:
        """Return what this node has of its cluster's working set, as of the last turn."""
        return self._working_set.share(*self._told)

    def readings(self) -> dict[str, float]:
        """Return what the last turns found, by the names of the metrics."""
        return {**self._readings, **self._of_all}

    def close(self) -> None:
        """Stop looking; waits for the thread. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _listed(self) -> Iterator[Keys]:
        cursor, is_over = 0, False
        while not (is_over or self._closing.is_set()):
            keys, _, cursor = self._pool.list(cursor, _BATCH)
            is_over = cursor == 0
            yield keys

    def _run(self) -> None:
        n_turns = 0
        while not self._closing.wait(_TURN_S):
            n_turns += 1
            try:
                self.turn()
                if n_turns % _TURNS_OF_ALL == 0:
                    self.turn_of_all()
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop
                self._log.error(type(error).__name__, "the working set was not estimated", exc_info=error)
