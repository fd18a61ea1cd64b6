"""What a node's calls found for an engine's requests, lately: the first half of an answer to "why did this one miss".

Calls say which requests they are for by :func:`p2pkv.tracing.about`, as the connectors do, and are heard of only with
the setting ``tracing``. The other half is what became of the pages that were missed, which every node remembers.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from p2pkv.explain.messages import MAX_KEY_BYTES, Call
from p2pkv.page import Keys, Outcomes

_MOST_REQUESTS = 4096
"""The requests that were heard of last are remembered, 2 KiB each at most but for their names."""
_MOST_CALLS = 64
"""Calls of one request: what comes later is left out."""
_MOST_MISSED = 16
"""Missed pages of one call that are named."""

Hash = Callable[[Sequence[str | bytes]], Keys]


class Requests:
    """Thread-safe. ``hash_keys`` makes ids of keys."""

    def __init__(self, hash_keys: Hash) -> None:
        self._hash = hash_keys
        self._lock = threading.Lock()  # guards the next one
        self._calls: OrderedDict[str, list[Call]] = OrderedDict()

    def heard(
        self,
        requests: Sequence[str],
        call: str,
        keys: Sequence[str | bytes],
        outcomes: Outcomes,
        seconds: float,
    ) -> None:
        """Remember a call that was for ``requests``; ``outcomes`` says which pages it found."""
        missed = np.flatnonzero(outcomes == 0)[:_MOST_MISSED]
        ids = self._hash([keys[row] for row in missed.tolist()]) if len(missed) else ()
        heard = Call(
            at=time.time(),
            call=call,
            n_pages=len(outcomes),
            n_found=int(np.count_nonzero(outcomes)),
            seconds=seconds,
            missed=tuple(page_id.tobytes() for page_id in ids),
        )
        with self._lock:
            for request in requests:
                calls = self._calls.setdefault(request[:MAX_KEY_BYTES], [])
                self._calls.move_to_end(request[:MAX_KEY_BYTES])
                if len(calls) < _MOST_CALLS:
                    calls.append(heard)
            while len(self._calls) > _MOST_REQUESTS:
                self._calls.popitem(last=False)

    def of(self, request: str) -> tuple[Call, ...]:
        """Return the calls for a request, in the order in which they ended."""
        with self._lock:
            return tuple(self._calls.get(request, ()))
