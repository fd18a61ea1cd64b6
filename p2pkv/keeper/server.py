"""The keeper's process: it holds descriptors of memory that nodes have left, and maps none of it.

It is small on purpose, and does nothing by itself: what it has not in hand when it ends is gone with the node that made
it. Whoever may connect to its socket, this user alone, may have what it keeps.
"""

from __future__ import annotations

import os
import selectors
import socket
import stat
import time

from p2pkv.attach.host import PATH_LOOK_S, EngineSocket, PathWatch
from p2pkv.descriptors import LACKING, NOBODY_IN_S
from p2pkv.keeper.memory import PoolMemory
from p2pkv.keeper.packets import read_request, receive, send, user_of
from p2pkv.transports.base import Resource

_MOST_KEPT = 64
_MOST_VISITORS = 64
"""Connections at once; the one that was made first has to go."""


class KeeperServer(Resource):
    """Listens from construction to :meth:`close`; :meth:`serve` answers."""

    def __init__(self, path: str) -> None:
        self._socket = EngineSocket(path, setting="the keeper's address", who="keeper")
        self._socket.socket.setblocking(False)
        self._path_watch = PathWatch(self._socket, "the keeper")
        self._look_at = time.monotonic() + PATH_LOOK_S
        self._kept: dict[str, PoolMemory] = {}
        self._visitors: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket.socket, selectors.EVENT_READ)
        self._is_open = True

    @property
    def n_kept(self) -> int:
        """How many pools' memories are kept."""
        return len(self._kept)

    def serve(self, timeout: float | None = None) -> None:
        """Answer whatever was asked, after waiting for it; look after the path once a second, if called so often."""
        if time.monotonic() >= self._look_at:
            self._look_after_path()
        is_open = self._is_open
        if not is_open:
            timeout = NOBODY_IN_S if timeout is None else min(timeout, NOBODY_IN_S)
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._socket.socket:
                self._let_in()
            elif (visitor := self._visitors.get(key.fd)) is key.fileobj and visitor is not None:
                self._hear(visitor)  # unless it has just had to go, for one who was let in
        if not is_open:
            self._selector.register(self._socket.socket, selectors.EVENT_READ)
            self._is_open = True

    def _look_after_path(self) -> None:
        self._look_at = time.monotonic() + PATH_LOOK_S
        before = self._socket.socket
        if self._path_watch.look():
            self._socket.socket.setblocking(False)
            if self._is_open:
                self._selector.unregister(before)
                self._selector.register(self._socket.socket, selectors.EVENT_READ)

    def _let_in(self) -> None:
        try:
            visitor, _ = self._socket.socket.accept()
        except OSError as error:
            if error.errno in LACKING:
                self._selector.unregister(self._socket.socket)
                self._is_open = False
            return
        visitor.setblocking(False)
        if user_of(visitor) != os.geteuid():
            visitor.close()
            return
        if len(self._visitors) >= _MOST_VISITORS:
            self._hang_up(next(iter(self._visitors.values())))
        self._visitors[visitor.fileno()] = visitor
        self._selector.register(visitor, selectors.EVENT_READ)

    def _hang_up(self, visitor: socket.socket) -> None:
        self._selector.unregister(visitor)
        del self._visitors[visitor.fileno()]
        visitor.close()

    def _hear(self, visitor: socket.socket) -> None:
        try:
            text, fds = receive(visitor)
            if not text:
                for fd in fds:  # an empty packet may bring some
                    os.close(fd)
                self._hang_up(visitor)
                return
            self._answer(visitor, text, fds)
        except OSError:
            self._hang_up(visitor)

    def _answer(self, visitor: socket.socket, text: str, fds: list[int]) -> None:
        request = read_request(text)
        memory = PoolMemory(*fds) if len(fds) == 2 else None
        verb, name = ("", "") if request is None else request
        if verb == "KEEP" and memory is not None and _are_files(memory):
            if name not in self._kept and len(self._kept) >= _MOST_KEPT:
                memory.close()
                send(visitor, f"REFUSED {_MOST_KEPT} pools are kept already")
                return
            self._drop(name)
            self._kept[name] = memory
            send(visitor, "KEPT")
            return
        for fd in fds:
            os.close(fd)
        if verb == "GIVE":
            kept = self._kept.get(name)
            send(visitor, "NONE" if kept is None else "KEPT", kept)
        elif verb == "DROP":
            self._drop(name)
            send(visitor, "NONE")
        else:
            send(visitor, "REFUSED that is no request of version 1")

    def _drop(self, name: str) -> None:
        if (kept := self._kept.pop(name, None)) is not None:
            kept.close()

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        for visitor in list(self._visitors.values()):
            self._hang_up(visitor)
        self._selector.close()
        self._socket.close()
        for name in list(self._kept):
            self._drop(name)


def _are_files(memory: PoolMemory) -> bool:
    return all(stat.S_ISREG(os.fstat(fd).st_mode) for fd in memory)
