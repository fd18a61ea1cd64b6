"""A node's counters for whoever has the cluster's secret and asks: ``p2pkv top`` does."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping

import msgspec

from p2pkv import _native
from p2pkv.control.wire import Kind, ReplyStatus
from p2pkv.errors import ControlError
from p2pkv.limited_log import LimitedLog

_log = logging.getLogger(__name__)

_TAKE_S = 60.0
"""How long the thread sleeps at most when nobody asks; closing wakes it."""


class CountersServer:
    """Answers COUNTERS with what ``read`` returns, in a thread that runs from construction to :meth:`close`."""

    def __init__(self, loop: _native.ControlLoop, read: Callable[[], Mapping[str, float]]) -> None:
        self._loop = loop
        self._read = read
        self._log = LimitedLog(_log)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2pkv-counters", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            event = self._loop.take(Kind.COUNTERS, _TAKE_S)
            if event is None:
                continue
            try:
                answer = encode_counters(self._read())
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop: the next question is another
                self._log.error(
                    type(error).__name__, "this node's counters could not be read", exc_info=error
                )
                self._loop.reply(
                    event[0], ReplyStatus.REFUSED, f"counters could not be read: {error}".encode()
                )
            else:
                self._loop.reply(event[0], ReplyStatus.OK, answer)

    def close(self) -> None:
        """Answer no more; waits for the thread. Idempotent."""
        self._closing.set()
        self._loop.wake(Kind.COUNTERS)
        self._thread.join()


def encode_counters(counters: Mapping[str, float]) -> bytes:
    """Build the answer to a COUNTERS."""
    return msgspec.msgpack.encode({name: float(value) for name, value in counters.items()})


def decode_counters(body: bytes) -> dict[str, float]:
    """Read the answer to a COUNTERS. Raises :class:`~p2pkv.errors.ControlError` for what no node could have sent."""
    try:
        counters = msgspec.msgpack.decode(body, type=dict[str, float])
    except msgspec.DecodeError as error:  # a body of wrong types raises a subclass
        raise ControlError(f"the answer to a question for counters can't be read: {error}") from error
    if not all(map(math.isfinite, counters.values())):
        raise ControlError("the answer to a question for counters has a number that is none")
    return counters
