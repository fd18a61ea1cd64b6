"""When calls may run: the gate that each goes through, and what becomes of both when the interpreter ends or forks.

``with gate:`` stands around every call. No call enters once it is closed, and memory goes when the last has left. It is
native, because an exception that a signal's handler raises (Ctrl-C, a test's time-out) may come between any two steps
of Python code: a gate in Python loses count that way, and whoever closes it waits for ever.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from p2pkv._native import Gate
from p2pkv.errors import ClosedError

__all__ = ["Closable", "Gate", "Origin", "forget", "watch", "weakly"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Closable(Protocol):
    """Something with threads of its own that must end before the interpreter does."""

    def close(self) -> None:
        """End it. Idempotent."""


class Origin:
    """The process that something was made in. In a forked child what is there of it is its parent's.

    Native locks may be held by threads that a child does not have, and its sockets are those of its parent, whose peers
    would hang up on it for anything that the child says.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def require(self, what: str) -> None:
        """Raise :class:`~p2pkv.errors.ClosedError` in a forked child; ``what``: a name for the message."""
        if not self.is_here:
            raise ClosedError(f"{what} is of process {self._pid}, of which this one was forked")


_running: dict[Closable, Gate] = {}
"""What is open. It is kept alive: its threads run until it is closed, whoever still holds it."""


def watch(running: Closable, gate: Gate) -> None:
    """Close ``running`` when the interpreter ends; in a forked child let its ``gate`` take it for closed."""
    _running[running] = gate


def forget(closed: Closable) -> None:
    """Watch it no longer. Idempotent."""
    _running.pop(closed, None)


def weakly(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a callable that does as a bound method does, and does not keep its object alive.

    For what an object gives to parts of its own, which call it only while it lives: with the method itself both would
    lie about after their close until the garbage collector looks for them.
    """
    held = weakref.WeakMethod(method)

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        alive = held()
        assert alive is not None, f"{method_name} was called by what its object had to close before it went"
        return alive(*args, **kwargs)

    method_name = method.__qualname__
    return call


def _close_all() -> None:
    # Later the interpreter would end our threads wherever they are, and C++ does not survive that.
    for running in list(_running):
        running.close()


def _forget_all() -> None:
    for gate in list(_running.values()):
        gate.forked()
    _running.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
