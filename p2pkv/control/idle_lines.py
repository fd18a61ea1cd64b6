"""Sockets to peers by which nothing is asked, kept for the next question, so that it needs no handshake."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import zmq

from p2pkv.control.secret import ClusterKeys

_IDLE_SOCKETS = 64
"""Kept a peer; as many threads can ask it at once without a new handshake."""
_UNUSED_S = 600.0
"""After that an idle socket is closed. Members are asked more often, however many there are, and who asks them forgets
those that go. This is for what is nobody's address any more without that being known: a number that a join name stood
for, a router's picture of nodes, an answer that came when its node had gone."""
_LOOK_S = 60.0
"""How often it is looked for these."""


class Line(NamedTuple):
    """A socket that leads to a peer, if that goes by these keys."""

    socket: zmq.Socket[bytes]
    keys: ClusterKeys


class _Idle(NamedTuple):
    line: Line
    since: float


class IdleLines:
    """Not thread-safe. What it returns is the caller's, who closes it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._by_address: dict[str, list[_Idle]] = {}  # those that were used last are at the end
        self._look_at = now() + _LOOK_S

    def has(self, address: str) -> bool:
        """Whether there is one to a peer."""
        return bool(self._by_address.get(address))

    def take(self, address: str) -> Line | None:
        """Return the one to a peer that was used last; None: there is none."""
        idle = self._by_address.get(address)
        return idle.pop().line if idle else None

    def keep(self, address: str, line: Line) -> bool:
        """Take one in; False, and it stays the caller's, if there are as many to that peer as are kept."""
        idle = self._by_address.setdefault(address, [])
        if len(idle) >= _IDLE_SOCKETS:
            return False
        idle.append(_Idle(line, self._now()))
        return True

    def forget(self, address: str) -> list[Line]:
        """Return all that lead to a peer."""
        return [each.line for each in self._by_address.pop(address, [])]

    def forget_all(self) -> list[Line]:
        """Return all."""
        return [line for address in list(self._by_address) for line in self.forget(address)]

    def take_unused(self) -> tuple[list[Line], list[str]]:
        """Return those that were not used for long, and where nothing is left; once a minute, and nothing else."""
        now = self._now()
        if now < self._look_at:
            return [], []
        self._look_at = now + _LOOK_S
        unused: list[Line] = []
        for idle in self._by_address.values():
            unused += [each.line for each in idle if each.since + _UNUSED_S <= now]
            idle[:] = [each for each in idle if each.since + _UNUSED_S > now]
        empty = [address for address, idle in self._by_address.items() if not idle]
        for address in empty:
            del self._by_address[address]
        return unused, empty
