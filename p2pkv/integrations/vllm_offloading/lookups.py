"""Which chunks the cluster has: asked for in one round a step, of all that a step's requests want to know.

vLLM asks for one chunk after another and goes on with the next while it is not known; it asks again in its next step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

Exists = Callable[[Sequence[bytes]], NDArray[np.bool_]]


class Lookups:
    """Used by the scheduler's thread alone, which waits for none of the answers; one thread asks."""

    def __init__(self, exists: Exists) -> None:
        """``exists`` says of each key whether it is there; it may block, and must not raise."""
        self._exists = exists
        self._known: dict[str, dict[bytes, bool]] = {}  # by request
        self._asking: dict[bytes, set[str]] = {}  # who wants to know
        self._next: list[bytes] = []
        self._rounds: list[tuple[list[bytes], Future[NDArray[np.bool_]]]] = []
        # one thread: rounds of several steps would only share the same sockets
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="p2pkv-vllm-tier-ask")
        self._is_closed = threading.Event()

    def found(self, request_id: str, key: bytes) -> bool | None:
        """Say whether a chunk is there; None: not known yet."""
        self._hear()
        known = self._known.setdefault(request_id, {})
        if key not in known:
            if key not in self._asking:
                self._asking[key] = set()
                self._next.append(key)
            self._asking[key].add(request_id)
        return known.get(key)

    def ask(self) -> None:
        """Ask for what is not known; to be called at the end of each step."""
        self._hear()
        if self._next and not self._is_closed.is_set():
            keys, self._next = self._next, []
            self._rounds.append((keys, self._thread.submit(self._exists, keys)))

    def _hear(self) -> None:
        while self._rounds and self._rounds[0][1].done():
            keys, answer = self._rounds.pop(0)
            for key, is_there in zip(keys, answer.result().tolist(), strict=True):
                for request_id in self._asking.pop(key, ()):
                    if request_id in self._known:
                        self._known[request_id][key] = is_there

    def missed(self, keys: Collection[bytes]) -> None:
        """Take note that chunks that were there are not."""
        for known in self._known.values():
            known.update((key, False) for key in keys if key in known)

    def forget(self, request_id: str) -> None:
        """Drop what is known for a request."""
        self._known.pop(request_id, None)

    def reset(self) -> None:
        """Drop all that is known, and what is being asked: chunks have other names from here on."""
        self._known.clear()
        self._asking.clear()
        self._next.clear()
        for _, answer in self._rounds:
            answer.cancel()
        self._rounds.clear()

    def close(self) -> None:
        """End the thread; close the node before, so that nothing is waited for. Idempotent."""
        self._is_closed.set()
        self._thread.shutdown(cancel_futures=True)
