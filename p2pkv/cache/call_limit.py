"""How many calls of a tenant a node has under way at once: who comes beyond that waits, and misses at its deadline.

What only gives room back (:meth:`LimitedCache.retract`, :meth:`LimitedCache.clear`) is never kept waiting.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from p2pkv import _native
from p2pkv.cache.page_cache import PageCache
from p2pkv.page import Keys, Outcome, Outcomes, Pages, Whereabouts


class CallLimit:
    """Lets at most ``most`` calls in at a time, in the order in which they come. Thread-safe.

    Places are counted natively, so that an exception of a signal's handler, which may come between any two steps here,
    never costs one.
    """

    def __init__(self, most: int) -> None:
        self._native = _native.CallLimit(most)

    def entered(self, deadline: float) -> _native.CallPlace:
        """Wait for a place until ``deadline``; ``with`` says whether there is one, and gives it back at its end."""
        return self._native.entered(deadline - time.monotonic())

    @property
    def n_refused(self) -> int:
        """Calls that were over before they were let in."""
        return self._native.n_refused

    @property
    def n_waiting(self) -> int:
        """Calls that wait for a place now."""
        return self._native.n_waiting

    def close(self) -> None:
        """Let nobody in any more, nor wait. Idempotent."""
        self._native.close()

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

    def exists(self, keys: Sequence[str | bytes], deadline: float, *, leading: bool = False) -> Outcomes:
        """As :meth:`PageCache.exists`."""
        with self._limit.entered(deadline) as is_in:
            return self._cache.exists(keys, deadline, leading=leading) if is_in else self._missed(keys)

    def whereabouts(
        self, keys: Sequence[str | bytes], deadline: float, *, leading: bool = False
    ) -> Whereabouts:
        """As :meth:`PageCache.whereabouts`."""
        with self._limit.entered(deadline) as is_in:
            if is_in:
                return self._cache.whereabouts(keys, deadline, leading=leading)
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
