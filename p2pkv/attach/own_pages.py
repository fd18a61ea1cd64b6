"""What an attached engine tells of the pages that it has published: whether its host's node has them in memory.

The pool is the node's, whose own KV events say all of it. Who has no words for the pages of others, as an engine whose
events name blocks, follows those of its own: a thread looks for them in the mapped pool, some at a time and round and
round, and tells what it finds otherwise than before. It asks nobody, and nobody waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from p2pkv.limited_log import LimitedLog
from p2pkv.page import Keys

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
"""Between two looks."""
_MOST_LOOKED_FOR = 1 << 14
"""Pages in one look, which takes a millisecond or so: a million are gone through in some six seconds."""
MOST_GONE = 1 << 16
"""So many pages are looked for that are nowhere, in case they come back; those that were published first are not."""

Follower = Callable[[str, str, Sequence[bytes]], None]
"""As that of ``Node.follow_kv_events``."""
Find = Callable[[Keys], NDArray[np.bool_]]
"""Says which of some pages are in the pool; in that of no node, none is."""


class OwnPages:
    """Thread-safe. Remembers nothing before somebody follows; a thread runs from then on, until :meth:`close`."""

    endpoint = None
    """Nothing is told to other processes: the host's node does that."""
    replay_endpoint = None

    def __init__(self, find: Find, medium: str) -> None:
        """``find`` looks into the pool, which is called ``medium``."""
        self._find, self._medium = find, medium
        self._log = LimitedLog(_log)
        self._lock = threading.Lock()  # guards the next three
        self._followers: tuple[Follower, ...] = ()
        self._new: list[Keys] = []
        self._thread: threading.Thread | None = None
        # the thread's alone: whether each page is there, as it was told last, in the order of publishing
        self._known: dict[bytes, bool] = {}
        self._turn: list[bytes] = []
        self._closing = threading.Event()

    def follow(self, follower: Follower) -> None:
        """Have ``follower`` told, on a thread that it must not block, of what is published from now on."""
        with self._lock:
            self._followers = (*self._followers, follower)
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._run, name="p2pkv-own-pages", daemon=True)
                thread.start()
                self._thread = thread

    def add(self, keys: Keys) -> None:
        """Take note of pages that were published. Free where nobody follows."""
        if self._followers and len(keys):
            with self._lock:
                self._new.append(keys.copy())

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_S):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop
                self._log.error(type(error).__name__, "pages in the host's node are not told", exc_info=error)

    def _look(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        names = [key.tobytes() for keys in new for key in keys]
        for name in names:
            self._known.setdefault(name, False)
        if not self._turn:
            self._drop_gone()
            self._turn = list(self._known)
        n = max(0, _MOST_LOOKED_FOR - len(names))
        some, self._turn = self._turn[:n], self._turn[n:]
        names = list(dict.fromkeys([*names, *some]))
        if not names:
            return
        found = self._find(np.frombuffer(b"".join(names), np.uint8).reshape(len(names), -1)).tolist()
        told = self._known
        self._tell(
            "BlockRemoved", [n for n, is_there in zip(names, found, strict=True) if told[n] and not is_there]
        )
        self._tell(
            "BlockStored", [n for n, is_there in zip(names, found, strict=True) if is_there and not told[n]]
        )

    def _tell(self, kind: str, names: list[bytes]) -> None:
        if not names:
            return
        self._known.update(dict.fromkeys(names, kind == "BlockStored"))
        for follower in self._followers:
            follower(kind, self._medium, names)

    def _drop_gone(self) -> None:
        gone = [name for name, is_there in self._known.items() if not is_there]
        for name in gone[: max(0, len(gone) - MOST_GONE)]:
            del self._known[name]

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None:
            thread.join()
