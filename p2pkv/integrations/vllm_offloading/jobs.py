"""Transfers between vLLM's host memory and the cluster, which vLLM calls jobs.

Every job ends by its deadline, and is reported exactly once, whatever became of it. Nothing reads or writes its chunks
any more when it is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from p2pkv.integrations.boundary import Boundary
from p2pkv.page import Outcome, Outcomes, Pieces

LOADING, STORING = 4, 1
"""Threads. What a request waits for goes side by side, what nobody waits for one after another."""
BATCH_CHUNKS = 128
"""So many at once get a ``deadline``, as SGLang's batches do."""
PATIENCE_S = 5.0
"""How long a store may wait for its turn before it is given up, so that a slow cluster does not keep vLLM's host memory
for ever. It is a guess."""


@dataclass(frozen=True, slots=True)
class Job:
    """Chunks to move, in vLLM's order."""

    number: int
    is_load: bool
    keys: tuple[bytes, ...]
    """As vLLM has them."""
    names: list[bytes]
    """As the cluster has them: with the weights that they are of."""
    pieces: Pieces
    epoch: int
    """Of the namespace when vLLM asked: what is stored since a bump was computed before it."""


@dataclass(frozen=True, slots=True)
class Done:
    """A job that has ended."""

    job: Job
    has_moved: list[bool]
    """By chunk; of a store also those that were there."""
    seconds: float


Move = Callable[[Job, slice], Outcomes]
"""Moves some of a job's chunks, within a ``deadline``."""


class Jobs:
    """Started and taken by the scheduler's thread, which waits for none of them but in :meth:`drain`."""

    def __init__(
        self, load: Move, store: Move, boundary: Boundary, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._load, self._store, self._clock = load, store, clock
        self.boundary = boundary
        self._changed = threading.Condition()  # guards what follows
        self._running: dict[int, Future[None]] = {}
        self._done: deque[Done] = deque()
        self._is_draining = False
        self._loading = ThreadPoolExecutor(LOADING, thread_name_prefix="p2pkv-vllm-tier-load")
        self._storing = ThreadPoolExecutor(STORING, thread_name_prefix="p2pkv-vllm-tier-store")

    def start(self, job: Job) -> None:
        """Queue a job; one that can't be has ended, and nothing has moved."""
        began = self._clock()
        started: Future[None] = Future()
        with self._changed:
            self._running[job.number] = started
        pool = self._loading if job.is_load else self._storing
        is_queued = self.boundary.call(
            "queue", partial(pool.submit, self._run, job, began, started), miss=None
        )
        # the pool queues what it then has no thread for
        if is_queued is None and started.cancel():
            self._end(job, [False] * len(job.keys), began)

    def _run(self, job: Job, began: float, started: Future[None]) -> None:
        if not started.set_running_or_notify_cancel():
            return
        has_moved = [False] * len(job.keys)
        move = self._load if job.is_load else self._store
        for first in range(0, len(job.keys), BATCH_CHUNKS):
            if self._is_draining or (not job.is_load and self._clock() - began > PATIENCE_S):
                break
            some = slice(first, first + BATCH_CHUNKS)
            outcomes = self.boundary.call(
                "get" if job.is_load else "set", partial(move, job, some), miss=None
            )
            if outcomes is None:
                break
            has_moved[some] = (outcomes == Outcome.HIT).tolist()
        self._end(job, has_moved, began)

    def _end(self, job: Job, has_moved: list[bool], began: float) -> None:
        with self._changed:
            self._running.pop(job.number, None)
            self._done.append(Done(job, has_moved, self._clock() - began))
            self._changed.notify_all()

    def take_done(self) -> list[Done]:
        """Return the jobs that have ended since the last time."""
        with self._changed:
            done, self._done = list(self._done), deque()
        return done

    def drain(self) -> None:
        """Block until all jobs have ended: within the ``deadline`` of those that are moving, and the others at once."""
        with self._changed:
            self._is_draining = True
            self._changed.wait_for(lambda: not self._running)
            self._is_draining = False

    def close(self) -> None:
        """End the threads; close the node before, so that nothing is waited for. Idempotent."""
        self._loading.shutdown()
        self._storing.shutdown()


def pieces_of(address: int, chunk_nbytes: int, chunk_ids: Sequence[int]) -> Pieces:
    """Return where chunks lie, each in one piece."""
    pieces = np.empty((len(chunk_ids), 1, 2), np.int64)
    pieces[:, 0, 0] = address + np.asarray(chunk_ids, np.int64) * chunk_nbytes
    pieces[:, 0, 1] = chunk_nbytes
    return Pieces(pieces)
