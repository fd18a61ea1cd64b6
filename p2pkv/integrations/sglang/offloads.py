"""What SGLang wants stored straight from its device pools: one after another, on a thread of its own.

SGLang holds the pages of each until it has the answer, asks how many answers there are once a step, and takes them in
the order in which it asked. All ranks must be asked and answer equally often, so whatever goes wrong is an answer too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

PATIENCE_S = 5.0
"""How long something may wait for its turn before it is given up, so that a slow cluster does not hold device pages
for ever. It is a guess."""

T = TypeVar("T")


class Offloads(Generic[T]):
    """A queue, and the thread that works it off with ``store``, which must not raise. Thread-safe.

    ``store(offload, is_wanted)`` says whether all of it is stored; it asks ``is_wanted()`` now and then, and ends early
    if nobody waits for it any more. None in the queue is something to answer with yes without storing it.
    """

    def __init__(
        self,
        store: Callable[[T, Callable[[], bool]], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._clock = clock
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[tuple[T | None, float]] = deque()
        self._answers: deque[bool] = deque()
        self._is_storing = False
        self._n_resets = 0  # what was begun before the last one has no answer
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="p2pkv-offload", daemon=True)
        self._thread.start()

    def submit(self, offload: T | None) -> None:
        """Queue ``offload``; never blocks."""
        with self._changed:
            self._waiting.append((offload, self._clock()))
            self._changed.notify_all()

    def __len__(self) -> int:
        """Return how many answers wait."""
        with self._changed:
            return len(self._answers)

    def pop(self) -> bool:
        """Take the oldest answer. Raises IndexError if there is none."""
        with self._changed:
            return self._answers.popleft()

    def reset(self) -> None:
        """Forget all of them and their answers; blocks until nothing is read from device memory any more."""
        with self._changed:
            self._n_resets += 1
            self._waiting.clear()
            self._answers.clear()
            self._changed.wait_for(lambda: not self._is_storing)

    def close(self) -> None:
        """End the thread, after :meth:`reset`. Idempotent."""
        self.reset()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                offload, since = self._waiting.popleft()
                n_resets = self._n_resets
                self._is_storing = True
            is_stored = False
            try:
                is_stored = self._stored(offload, since, n_resets)
            finally:
                with self._changed:
                    self._is_storing = False
                    if n_resets == self._n_resets:
                        self._answers.append(is_stored)
                    self._changed.notify_all()

    def _stored(self, offload: T | None, since: float, n_resets: int) -> bool:
        if offload is None:
            return True
        if self._clock() - since > PATIENCE_S:
            return False
        return self._store(offload, lambda: n_resets == self._n_resets)
