"""Waiting for the signals that end a command.

Not with a :class:`threading.Event` that a handler sets: the handler runs between two steps of the main thread, which
may hold that event's lock just then, and would wait for it for ever. Here the interpreter's own, native handler writes
the signal's number to a socket.
"""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from typing_extensions import Self


_ENDING = (signal.SIGINT, signal.SIGTERM)


class EndedError(BaseException):
    """A signal has come while something was under way that can't look for it. Nobody catches it by chance."""


class EndingSignals:
    """Catches SIGINT and SIGTERM from its making on. Made and used in the main thread."""

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._n_came = 0
        self._wakeup_before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _nothing) for number in _ENDING}

    def wait(self, timeout: float | None = None, *, times: int = 1) -> bool:
        """Wait at most ``timeout`` seconds until so many have come; return whether they have, now or before.

        Any signal that has a handler ends the wait early.
        """
        if self._n_came < times and select.select([self._reading], [], [], timeout)[0]:
            self._n_came += sum(number in _ENDING for number in self._reading.recv(4096))
        return self._n_came >= times

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Have a signal that comes meanwhile, or has come, raise :class:`EndedError` in this, the main thread.

        What is under way then takes itself down; another signal ends the process, should that take too long.
        """
        for number in _ENDING:
            signal.signal(number, _raise)
        try:
            if self.wait(0.0):  # before there was anything to break off
                raise EndedError
            yield
        finally:
            for number in _ENDING:
                signal.signal(number, _nothing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._reading.close()
        self._writing.close()


def _nothing(number: int, frame: FrameType | None) -> None:
    """Stand in for the default, which would end the process or raise."""


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    for each in _ENDING:
        signal.signal(each, signal.SIG_DFL)
    raise EndedError
