"""Pins that callers ask for: pages that stay in this node's pool for a while, whatever is published.

They have a share of the pool, so that there is always room for what is published, and each ends by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import UsageError
from p2pkv.lifetime import Origin
from p2pkv.metrics import Metrics
from p2pkv.page import Keys, Outcomes
from p2pkv.pool import Pool

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_TTL_S = 86400.0
_MOST_PINS = 65536
"""Pins that have neither been released nor ended; a guess."""


class Pin:
    """Pages that stay in a node's pool until :meth:`release`, or until their time is over. Thread-safe.

    Usable in a ``with`` statement, whose end releases it. One that is forgotten ends by itself all the same.
    """

    def __init__(self, pins: Pins, outcomes: Outcomes, tickets: NDArray[np.uint64], ends: float) -> None:
        self._pins = pins
        self._origin = Origin()
        self._outcomes = outcomes
        self.tickets = tickets
        """Of the pool's pins; for the one who releases them."""
        self.ends = ends
        """When it ends by itself, as a time of ``time.monotonic()``."""

    @property
    def outcomes(self) -> Outcomes:
        """``(n,)`` uint8: ``Outcome.HIT`` for each page that was pinned.

        The others are not in the pool, or had no room in the share of it that pins may have.
        """
        outcomes: Outcomes = self._outcomes.copy()
        return outcomes

    @property
    def seconds_left(self) -> float:
        """How long it holds by itself; 0 when it is over or was released."""
        return max(0.0, self.ends - time.monotonic()) if self._pins.holds(self) else 0.0

    def release(self) -> int:
        """Let the pages be evicted again; return how many were pinned until now. Never blocks. Idempotent.

        In a forked child it does nothing: there it is the parent's.
        """
        return self._pins.release(self) if self._origin.is_here else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class Pins:
    """Thread-safe. ``limit`` is how many bytes of the pool's blocks pins may hold together."""

    def __init__(self, pool: Pool, limit: int, metrics: Metrics) -> None:
        self._pool = pool
        self._limit = limit
        self._metrics = metrics
        self.on_asked_for: Callable[[Keys], None] = lambda _: None
        """Called with pages that are to be pinned, before they are looked for and after they were pinned."""
        # Guards what follows; reentrant, since a signal's handler may release a pin wherever a thread is.
        self._lock = threading.RLock()
        self._nbytes: dict[Pin, int] = {}

    def pin(self, ids: Keys, ttl: float) -> Pin:
        """Keep those of the pages that are in the pool there for ``ttl`` seconds, as far as there is room."""
        if isinstance(ttl, (bool, str, bytes)) or not 0 < ttl <= MAX_TTL_S:
            raise UsageError(f"ttl must be above 0 and at most {MAX_TTL_S:.0f} seconds, not {ttl!r}")
        self.on_asked_for(ids)
        with self._lock:
            self._forget_ended()
            room = max(0, self._limit - sum(self._nbytes.values())) if len(self._nbytes) < _MOST_PINS else 0
            found, tickets, _ = self._pool.pin(ids, ttl, room)
            # after the pool's own lease began, so that what is counted here is counted for as long as that
            pin = Pin(self, found, tickets, time.monotonic() + ttl)
            self._nbytes[pin] = self._pool.pinned_nbytes(tickets)
        # Once more: one that nobody had asked for may have come in between, and would go again when it cools.
        self.on_asked_for(ids)
        there, _ = self._pool.lookup(ids)
        n_pinned, n_absent = int(found.sum()), int(np.count_nonzero((there == 0) & (found == 0)))
        self._metrics.count(self._metrics.pinned_pages, "pinned", n_pinned)
        self._metrics.count(self._metrics.pinned_pages, "absent", n_absent)
        self._metrics.count(self._metrics.pinned_pages, "no_room", len(ids) - n_pinned - n_absent)
        return pin

    def release(self, pin: Pin) -> int:
        """End a pin; return how many pages it held until now."""
        with self._lock:
            if self._nbytes.pop(pin, None) is None:
                return 0
        return int(self._pool.unpin(pin.tickets).sum())

    def holds(self, pin: Pin) -> bool:
        """Whether it has neither been released nor ended."""
        with self._lock:
            self._forget_ended()
            return pin in self._nbytes

    @property
    def nbytes(self) -> int:
        """How many bytes of blocks are held. A page that several pins hold counts for each."""
        with self._lock:
            self._forget_ended()
            return sum(self._nbytes.values())

    def _forget_ended(self) -> None:
        now = time.monotonic()
        for pin in [pin for pin in self._nbytes if pin.ends <= now]:
            del self._nbytes[pin]
