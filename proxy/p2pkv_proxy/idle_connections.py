"""Clients' connections on which no request is under way: kept for long, and ended where there are too many of them.

A request that its client sends while the router ends the connection for want of one is lost: the client sees a reset,
and can't know whether anybody has read it. So it is left to clients to end what they don't need.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Protocol

IDLE = "p2pkv.idle"
"""Where a server's state has its :class:`IdleConnections`."""
KEEP_S = 620
"""How long one is kept for the next request: longer than whoever is before the router keeps theirs. nginx and AWS's
load balancers keep them for 60 s, Go's clients for 90 s, Google's load balancers for 600 s."""
_MOST = 16_384
"""Guess: about 200 MB of them. A quarter of all descriptors, where that is less."""


class IdleConnection(Protocol):
    """What can be ended to make room."""

    def end_idle(self) -> None: ...


class IdleConnections:
    """Those of one server, each in one of two lines; the first of a line has been there for longest.

    For one more than there may be those go first on which there never was a request. One event loop uses it.
    """

    def __init__(self, note_ended: Callable[[], None] = lambda: None, most: int | None = None) -> None:
        """``note_ended``: called for each that makes room. ``most``: as many may be there; None: by descriptors."""
        self._note_ended = note_ended
        self._most = most if most is not None else most_idle()
        self._strangers: dict[IdleConnection, None] = {}
        self._kept: dict[IdleConnection, None] = {}

    def __len__(self) -> int:
        return len(self._strangers) + len(self._kept)

    def add_stranger(self, connection: IdleConnection) -> None:
        """Take in one that is new."""
        self._add(connection, self._strangers)

    def add_kept(self, connection: IdleConnection) -> None:
        """Take in one on which a request has been answered."""
        self._add(connection, self._kept)

    def discard(self, connection: IdleConnection) -> None:
        """Let go of one that has a request, or has ended."""
        self._strangers.pop(connection, None)
        self._kept.pop(connection, None)

    def _add(self, connection: IdleConnection, line: dict[IdleConnection, None]) -> None:
        self.discard(connection)
        if len(self) >= self._most and len(self) > 0:
            longest = next(iter(self._strangers or self._kept))
            self.discard(longest)
            self._note_ended()
            longest.end_idle()
        line[connection] = None


def most_idle() -> int:
    """Return how many there may be in this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, soft // 4))
