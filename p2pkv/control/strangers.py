"""What is said of connections that were refused: a line a minute at most, however many come."""

from __future__ import annotations

import logging
import threading

from p2pkv import _native

_log = logging.getLogger(__name__)

_QUIET_S = 60.0
"""After a line, and how long the thread sleeps at most while nobody is refused; closing wakes it."""
_GATHER_S = 0.5
"""Before a line: who is refused tries again at once, and one that was gone before we looked gave no address."""


class StrangersLog:
    """Says who was refused, in a thread that runs from construction to :meth:`close`."""

    def __init__(self, refusals: _native.Refusals, *, quiet_s: float = _QUIET_S) -> None:
        self._refusals = refusals
        self._quiet_s = quiet_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2pkv-strangers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            if (report := self._refusals.take(self._quiet_s)) is None:
                continue
            n, hosts = report
            self._closing.wait(_GATHER_S)
            if (more := self._refusals.take(0.0)) is not None:
                n, hosts = n + more[0], list(dict.fromkeys([*hosts, *more[1]]))
            _log.warning(
                "refused %d connection%s from %s: whoever connects there has another secret, or none; give every node "
                "and router the same secret_file, and see p2pkv_refused_strangers_total",
                n,
                "" if n == 1 else "s",
                ", ".join(hosts) or "an unknown address",
            )
            self._closing.wait(self._quiet_s)

    def close(self) -> None:
        """Say nothing more; waits for the thread. Idempotent."""
        self._closing.set()
        self._refusals.wake()
        self._thread.join()
