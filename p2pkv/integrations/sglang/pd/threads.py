"""The threads of a transfer backend: each has a name, an owner that joins it, and outlives a failing task."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import zmq

from p2pkv.integrations.boundary import Boundary

_LOOK_MS = 200
"""How long a thread that waits for messages may take to notice that it is to end."""
_JOIN_S = 5.0


class Worker:
    """Does what it is told in order, on a thread of its own; what raises is counted, and the next is done."""

    def __init__(self, name: str, boundary: Boundary) -> None:
        self._boundary = boundary
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, task: Callable[[], None]) -> None:
        """Have ``task`` done; returns at once."""
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._boundary.call("task", task, miss=None)

    def close(self) -> None:
        """Do what is queued, then end. Idempotent."""
        self._tasks.put(None)
        self._thread.join(_JOIN_S)


class Mailbox:
    """Hands what comes to SGLang's ``socket`` to ``take``, on a thread of its own. The socket stays SGLang's."""

    def __init__(
        self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None], boundary: Boundary
    ) -> None:
        self._socket = socket
        self._take = take
        self._boundary = boundary
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2pkv-pd-mail", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._socket.poll(_LOOK_MS):
                self._boundary.call("message", self._take_one, miss=None)

    def _take_one(self) -> None:
        self._take(self._socket.recv_multipart())

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closing.set()
        self._thread.join(_JOIN_S)


class Ticker:
    """Calls ``tick`` every ``period`` seconds on a thread of its own."""

    def __init__(self, tick: Callable[[], None], *, period: float, boundary: Boundary) -> None:
        self._tick = tick
        self._period = period
        self._boundary = boundary
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2pkv-pd-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._period):
            self._boundary.call("watch", self._tick, miss=None)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closing.set()
        self._thread.join(_JOIN_S)
