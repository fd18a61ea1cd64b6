"""The threads that use a node: each makes one call after another until they are stopped, or the node is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random

from p2pkv import ClosedError

from .journal import Journal


class Threads:
    """A base for what uses node ``me``, in threads that ``run`` and pause between calls."""

    def __init__(
        self,
        me: str,
        journal: Journal,
        run: Sequence[Callable[[Random], None]],
        *,
        seed: str,
        pause_s: float,
    ) -> None:
        self._me = me
        self._pause_s = pause_s
        self._journal = journal
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=target, args=(Random(seed + target.__name__),), daemon=True)
            for target in run
        ]

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop them; returns when the calls under way have ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, what: Callable[[], None]) -> bool:
        """Make a call and pause; a closed node ends the thread, anything else that it raises is a broken promise."""
        try:
            what()
        except ClosedError:
            return False
        except Exception as error:  # noqa: BLE001  # the top of a thread's loop
            self._journal.write("broken", what=f"{self._me}: a call raised {type(error).__name__}: {error}")
        return not self._stop.wait(self._pause_s)
