"""How many calls of a tenant a node has under way at once: who comes beyond that waits, and misses at its deadline.

What only gives room back (:meth:`LimitedCache.retract`, :meth:`LimitedCache.clear`) is never kept waiting.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from p2pkv.cache.page_cache import PageCache
from p2pkv.page import Keys, Outcome, Outcomes, Pages, Whereabouts


class CallLimit:
    """Lets at most ``most`` calls in at a time, in the order in which they come. Thread-safe."""

    def __init__(self, most: int) -> None:
        # Guards what follows, and is notified when a call ends or gives up.
        self._condition = threading.Condition()
        self._left = most
        self._waiting: deque[object] = deque()
        self._is_closed = False
        self.n_refused = 0
        """Calls that were over before they were let in."""

    @contextmanager
    def entered(self, deadline: float) -> Iterator[bool]:
        """Wait for a place until ``deadline``; whether there is one, which is given back at the end."""
        with self._condition:
            is_in = self._wait(max(0.0, deadline - time.monotonic()))
            self._left -= is_in
            self.n_refused += not is_in
        try:
            yield is_in
        finally:
            if is_in:
                with self._condition:
                    self._left += 1
                    self._condition.notify_all()  # whose turn it is only he knows

    def _wait(self, seconds: float) -> bool:
        """Wait, with the lock, for a place that nobody has come for before; whether there is one."""
        turn = object()
        self._waiting.append(turn)
        try:
            self._condition.wait_for(
                lambda: self._is_closed or (self._left > 0 and self._waiting[0] is turn), seconds
            )
            return not self._is_closed and self._left > 0 and self._waiting[0] is turn
        finally:
            self._waiting.remove(turn)
            self._condition.notify_all()  # the next one may be first now

    def close(self) -> None:
        """Let nobody in any more, nor wait. Idempotent."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def readings(self) -> dict[str, float]:
        """Return what is counted, by the names of the metrics."""
        return {"p2pkv_limited_calls_total": self.n_refused}


class LimitedCache:
    """The calls of a cache, as many at a time as a limit lets in. All promises are the cache's."""

    def __init__(self, cache: PageCache, limit: CallLimit) -> None:
        self._cache = cache
        self._limit = limit

    def publish(
        self,
        keys: Sequence[str | bytes],
        pages: Pages,
        deadline: float,
        *,
        stream: int | None = None,
        epoch: int | None = None,
    ) -> Outcomes:
        """As :meth:`PageCache.publish`. A bump while it waits ends it: the pages are of the epoch at the call."""
        if epoch is None:
            epoch, _ = self._cache.hash(keys)
        with self._limit.entered(deadline) as is_in:
            if is_in:
                return self._cache.publish(keys, pages, deadline, stream=stream, epoch=epoch)
            return self._missed(keys)

    def fetch(
        self, keys: Sequence[str | bytes], pages: Pages, deadline: float, *, stream: int | None = None
    ) -> Outcomes:
        """As :meth:`PageCache.fetch`."""
        with self._limit.entered(deadline) as is_in:
            if is_in:
                return self._cache.fetch(keys, pages, deadline, stream=stream)
            return self._missed(keys)

    def exists(self, keys: Sequence[str | bytes], deadline: float) -> Outcomes:
        """As :meth:`PageCache.exists`."""
        with self._limit.entered(deadline) as is_in:
            return self._cache.exists(keys, deadline) if is_in else self._missed(keys)

    def whereabouts(self, keys: Sequence[str | bytes], deadline: float) -> Whereabouts:
        """As :meth:`PageCache.whereabouts`."""
        with self._limit.entered(deadline) as is_in:
            if is_in:
                return self._cache.whereabouts(keys, deadline)
            return Whereabouts.nowhere(len(self._missed(keys)))

    def retract(self, keys: Sequence[str | bytes], deadline: float) -> Outcomes:
        """As :meth:`PageCache.retract`."""
        return self._cache.retract(keys, deadline)

    def clear(self, deadline: float) -> int:
        """As :meth:`PageCache.clear`."""
        return self._cache.clear(deadline)

    def hash(self, keys: Sequence[str | bytes]) -> tuple[int, Keys]:
        """As :meth:`PageCache.hash`."""
        return self._cache.hash(keys)

    def _missed(self, keys: Sequence[str | bytes]) -> Outcomes:
        """Return that no page is there; a batch that no call takes is an error now as well."""
        return np.full(len(self._cache.hash(keys)[1]), Outcome.MISS, np.uint8)
