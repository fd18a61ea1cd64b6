"""Questions of peers and of the command line that Python answers: what is counted here, what became of a page."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from p2pkv import _native
from p2pkv.control.wire import Kind, ReplyStatus
from p2pkv.errors import ControlError, UsageError
from p2pkv.limited_log import LimitedLog

_log = logging.getLogger(__name__)

_TAKE_S = 60.0
"""How long the thread sleeps at most when nobody asks; closing wakes it."""


class QuestionServer:
    """Answers requests of one kind with what ``answer`` makes of their bodies, in a thread until :meth:`close`.

    What ``answer`` raises is a refusal that says why: :class:`~p2pkv.errors.UsageError` one that is expected,
    :class:`~p2pkv.errors.ControlError` the asker's fault, and anything else this node's.
    """

    def __init__(self, loop: _native.ControlLoop, kind: Kind, answer: Callable[[bytes], bytes]) -> None:
        self._loop = loop
        self._kind = kind
        self._answer = answer
        self._log = LimitedLog(_log)
        self._closing = threading.Event()
        name = f"p2pkv-{kind.name.lower()}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            event = self._loop.take(self._kind, _TAKE_S)
            if event is None:
                continue
            route, body = event
            try:
                answer = self._answer(body)
            except ControlError as error:
                self._loop.reply(route, ReplyStatus.MALFORMED, str(error).encode())
            except UsageError as error:
                self._loop.reply(route, ReplyStatus.REFUSED, str(error).encode())
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop: the next question is another
                what = self._kind.name.lower()
                self._log.error(
                    type(error).__name__, "a request of kind %s can't be answered", what, exc_info=error
                )
                self._loop.reply(route, ReplyStatus.REFUSED, f"{what} can't be answered: {error}".encode())
            else:
                self._loop.reply(route, ReplyStatus.OK, answer)

    def close(self) -> None:
        """Answer no more; waits for the thread. Idempotent."""
        self._closing.set()
        self._loop.wake(self._kind)
        self._thread.join()
