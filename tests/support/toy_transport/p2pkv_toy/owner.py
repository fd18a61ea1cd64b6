"""The owner's side: a door that lets in who has a token, and a thread for each reader that is in."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable

import numpy as np

from p2pkv.errors import TransportError
from p2pkv_toy import wire
from p2pkv_toy.memory import ToyMemoryRegion

_log = logging.getLogger(__name__)

_HELLO_S = 5.0
"""How long a visitor may take to say its hello."""
_SEND_S = 30.0
"""How long a reader may take nothing of an answer."""
_MAX_WAITING = 64
"""Visitors that have not said their hello yet; for one more the oldest has to go."""
_PAUSE_S = 0.1
"""How long the door stays shut when the process has no descriptor or thread for a visitor."""


class Grant:
    """Lets one reader in, once. ``on_left`` is called, in its thread, when that reader has gone."""

    def __init__(self, owner: Owner) -> None:
        self.token = secrets.token_bytes(wire.TOKEN_NBYTES)
        self.connection: socket.socket | None = None
        self.on_left: Callable[[], None] | None = None
        self._owner = owner

    def close(self) -> None:
        """Let nobody in any more, and hang up on who came in by it. Idempotent."""
        self._owner.revoke(self)


class Owner:
    """Listens, and answers from the regions that ``find`` returns by their ids.

    ``_lock`` guards the grants and the visits. Each visit is a thread, which alone closes its socket; others shut it
    down, which ends whatever the thread waits for.
    """

    def __init__(
        self, host: str, port: int, *, piece_nbytes: int, find: Callable[[int], ToyMemoryRegion | None]
    ) -> None:
        self._find = find
        self._piece_nbytes = piece_nbytes
        self._lock = threading.Lock()
        self._grants: dict[bytes, Grant] = {}
        self._visits: dict[socket.socket, threading.Thread] = {}
        self._waiting: dict[socket.socket, None] = {}
        self._closing = threading.Event()
        self._listener = socket.create_server((host, port), backlog=_MAX_WAITING)
        self.port: int = self._listener.getsockname()[1]
        self._door = threading.Thread(target=self._let_in, name="toy-door", daemon=True)
        self._door.start()

    def grant(self) -> Grant:
        """Return a token for one reader."""
        grant = Grant(self)
        with self._lock:
            self._grants[grant.token] = grant
        return grant

    def revoke(self, grant: Grant) -> None:
        """Forget a token, and hang up on who used it."""
        with self._lock:
            self._grants.pop(grant.token, None)
            if grant.connection in self._visits:
                _hang_up(grant.connection)

    def _let_in(self) -> None:
        while not self._closing.is_set():
            try:
                visitor, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.wait(_PAUSE_S):
                    _log.warning("toy can't let a reader in: %s", error)
                continue
            thread = threading.Thread(target=self._visit, args=(visitor,), name="toy-reader", daemon=True)
            with self._lock:
                self._visits[visitor] = thread
                self._waiting[visitor] = None
                if len(self._waiting) > _MAX_WAITING:
                    _hang_up(next(iter(self._waiting)))
            try:
                thread.start()
            except RuntimeError as error:
                _log.warning("toy can't serve a reader: %s", error)
                self._end(visitor)
                self._closing.wait(_PAUSE_S)

    def _visit(self, visitor: socket.socket) -> None:
        grant: Grant | None = None
        try:
            grant = self._admit(visitor)
            while not self._closing.is_set():
                visitor.settimeout(None)
                n_spans = wire.unpack_request_header(wire.receive(visitor, wire.REQUEST.size))
                rows = np.frombuffer(wire.receive(visitor, 32 * n_spans), wire.ROW).reshape(n_spans, 4)
                visitor.settimeout(_SEND_S)
                self._answer(visitor, rows.tolist())
        except (OSError, TransportError) as error:
            _log.debug("a reader of toy is gone: %s", error)
        finally:
            self._end(visitor)
            if grant is not None and grant.on_left is not None:
                grant.on_left()

    def _admit(self, visitor: socket.socket) -> Grant:
        visitor.settimeout(_HELLO_S)
        token = wire.unpack_hello(wire.receive(visitor, wire.HELLO.size))
        with self._lock:
            self._waiting.pop(visitor, None)
            grant = self._grants.pop(token, None)  # a token is good for one connection
            if grant is None:
                raise TransportError("a hello had no live token")
            grant.connection = visitor
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        visitor.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return grant

    def _answer(self, visitor: socket.socket, rows: list[list[int]]) -> None:
        """Send the spans one after another, and behind the bytes of each its word.

        A word is loaded once the last byte of its span has been copied, so that one that still stands vouches for all.
        """
        out = bytearray()
        for region_id, offset, length, word in rows:
            region = self._find(region_id)
            if region is not None and not region.holds(offset, length, word):
                raise TransportError(f"a reader asked for {length} bytes at {offset} of {region.nbytes}")
            for at in range(0, length, self._piece_nbytes):
                nbytes = min(self._piece_nbytes, length - at)
                piece = None if region is None else region.copy(offset + at, nbytes)
                out += bytes(nbytes) if piece is None else piece  # what was announced must come
                if len(out) >= self._piece_nbytes:
                    visitor.sendall(out)
                    out.clear()
            value = None if region is None else region.load(word)
            out += wire.TRAILER.pack(0, 0) if value is None else wire.TRAILER.pack(1, value)
        visitor.sendall(out)

    def _end(self, visitor: socket.socket) -> None:
        with self._lock:
            self._visits.pop(visitor, None)
            self._waiting.pop(visitor, None)
            visitor.close()

    def close(self) -> None:
        """Let nobody in any more, hang up on everybody, and wait for the threads. Idempotent."""
        self._closing.set()
        with self._lock:
            _hang_up(self._listener)
        self._door.join()
        self._listener.close()
        with self._lock:
            self._grants.clear()
            visits = dict(self._visits)
            for visitor in visits:
                _hang_up(visitor)
        for thread in visits.values():
            thread.join()


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        _log.debug("the other end of toy was faster to hang up: %s", error)
