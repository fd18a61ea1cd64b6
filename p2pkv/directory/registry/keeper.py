"""Keeps this node's record in a store: written, renewed, and written again when it is gone.

It looks at what is wanted, not at what happened: whatever becomes of an entry (its lease ran out while the interpreter
was held, somebody deleted it, an answer was lost), the next step puts it right. The one thing it does not overwrite is
the record of another process that outranks ours: that is for the engine to settle.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from random import Random

from p2pkv.directory.registry.follower import CALL_S, FIRST_PAUSE_S, LONGEST_PAUSE_S
from p2pkv.directory.registry.store import Entry, Outranks, Store
from p2pkv.errors import RegistryError
from p2pkv.limited_log import LimitedLog

_log = logging.getLogger(__name__)

_BLOCKED_S = 1.0
"""Until a name that another process has is asked for again."""
_MOST_TRIES = 4
"""Of one write against others who write the same name, before it waits."""


class Keeper:
    """Each :meth:`step` is one turn of its owner's thread; only :attr:`wanted` is set by others."""

    def __init__(
        self, store: Store, where: str, ttl: float, clock: Callable[[], float], random: Random
    ) -> None:
        self._store = store
        self._where = where
        self._ttl = ttl
        self._clock = clock
        self._random = random
        self._name = ""
        self._outranks: Outranks = lambda ours, theirs: False
        self._held: int | None = None
        self._written: bytes | None = None
        self._renew_at = math.inf
        self._pause = FIRST_PAUSE_S
        self._limited = LimitedLog(_log, clock=clock)
        self.wanted: bytes | None = None
        self.n_failures = self.n_lost = 0

    def open(self, name: str, outranks: Outranks) -> None:
        """Say whose record this is, and whom it may replace."""
        self._name, self._outranks = name, outranks

    def claim(self, value: bytes, over: Collection[bytes], deadline: float) -> bytes | None:
        """Write ``value`` over nothing, or one of ``over``; return what else is in the way."""
        in_the_way = self._put(value, lambda theirs: theirs in over, deadline)
        if in_the_way is None:
            self.wanted = value
        return in_the_way

    def step(self) -> float:
        """Bring the store closer to what is wanted; return the seconds until the next step."""
        wanted = self.wanted
        try:
            if wanted is None:
                if self._held is not None:
                    self._store.remove(self._name, CALL_S)
                    self._held = None
                return math.inf
            now = self._clock()
            if self._held is not None and self._written == wanted:
                if now < self._renew_at:
                    return self._renew_at - now
                self._held = self._store.renew(self._name, self._held, CALL_S)
                if self._held is not None:
                    self._renewed()
                    return self._renew_at - self._clock()
                self.n_lost += 1
                _log.info("this node's record was gone from %s; it is put there again", self._where)
            return self._write(wanted)
        except RegistryError as error:
            return self._failed(error)

    def leave(self, timeout: float) -> None:
        """Take the record away, whatever became of it. Raises :class:`RegistryError`."""
        self.wanted = self._held = None
        if self._written is not None:
            self._store.remove(self._name, timeout)

    def _write(self, wanted: bytes) -> float:
        if (
            self._put(wanted, lambda theirs: self._outranks(wanted, theirs), self._clock() + 2 * CALL_S)
            is None
        ):
            return 0.0
        self._limited.warning("taken", "another process's record has this node's name in %s", self._where)
        return _BLOCKED_S

    def _put(self, value: bytes, may_replace: Callable[[bytes], bool], deadline: float) -> bytes | None:
        expected, self._held = self._held or 0, None
        before, self._written = self._written, value  # from here on it may be there, whatever is answered
        for _ in range(_MOST_TRIES):
            left = deadline - self._clock()
            if left <= 0:
                break
            result = self._store.put(self._name, value, expected, min(CALL_S, left))
            if isinstance(result, int):
                self._held = result
                self._renewed()
                return None
            assert isinstance(result, Entry)
            if result.value not in (value, before) and not may_replace(result.value):
                self._written = before
                return result.value
            expected = result.version
        raise RegistryError(
            f"{self._where} is busy: this node's name changed {_MOST_TRIES} times under our hands"
        )

    def _renewed(self) -> None:
        self._pause = FIRST_PAUSE_S
        # a third of its life, so that two renewals may fail; jitter, lest all nodes come at once
        self._renew_at = self._clock() + self._ttl / 3 * self._random.uniform(0.8, 1.0)

    def _failed(self, error: RegistryError) -> float:
        self.n_failures += 1
        self._limited.warning(
            "writing",
            "this node's record can't be kept: %s; it is tried again, and the cluster goes on",
            error,
        )
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE_S)
        return pause * self._random.uniform(0.5, 1.0)
