"""The reader's side: an endpoint has a connection of its own, driven by whichever thread waits."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from p2pkv.errors import ClosedError, TransportError, UsageError
from p2pkv.transports.base import (
    NO_WORD,
    Endpoint,
    MemoryRegion,
    RemoteRegion,
    Spans,
    Status,
    Statuses,
    Transfer,
    Words,
    check_batch,
    screen_spans,
)
from p2pkv_toy import wire
from p2pkv_toy.memory import ToyMemoryRegion, ToyRemoteRegion
from p2pkv_toy.owner import Grant

_GO_ON = 0
"""What the exchange waits for when it only lets others look at the clock."""
_MAX_RECEIVED = 1 << 20
"""Bytes between two such looks."""


class ToyTransfer(Transfer):
    """``_turn`` makes it one thread at a time that receives; whoever holds it may settle the transfer.

    Others ask for that with :meth:`abort`, which shuts the connection down and so wakes the thread that has the turn.
    """

    def __init__(
        self,
        endpoint: ToyEndpoint,
        local: ToyMemoryRegion,
        remote: ToyRemoteRegion,
        batch: tuple[Spans, Words | None],
    ) -> None:
        self._endpoint = endpoint
        self._local = local
        self._region_id = remote.id
        self._spans, self._words = batch
        self._statuses = screen_spans(*batch, local_nbytes=local.nbytes, remote_nbytes=remote.nbytes)
        self._turn = threading.Lock()
        self._outcome: Status | None = None
        self._exchange: Iterator[int] = iter(())
        self._awaited = select.POLLOUT  # the connection
        self.is_settled = not bool((self._statuses == Status.PENDING).any())

    def begin(self, connection: socket.socket, hello: bytes) -> None:
        """Go over a connection, which is new if there is a hello to be said."""
        self._connection = connection
        self._poll = select.poll()
        self._exchange = self._ask_and_receive(connection, hello)

    def done(self) -> bool:
        return self.advance(0.0)

    def advance(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        if self._turn.acquire(timeout=timeout) if timeout > 0 else self._turn.acquire(blocking=False):
            try:
                self._drive(deadline)
            finally:
                self._turn.release()
        return self.is_settled

    def wait(self, timeout: float) -> Statuses:
        self.advance(max(timeout, 0.0))
        self.settle(Status.TIMED_OUT)
        statuses: Statuses = self._statuses.copy()
        return statuses

    def abort(self, reason: Status) -> None:
        """Have what is pending settled as ``reason`` soon; its connection is of no use any more."""
        if self._outcome is None and not self.is_settled:
            self._outcome = reason
            self._endpoint.give_up()

    def settle(self, reason: Status) -> None:
        """Settle what is pending as ``reason``, and return when the local memory is out of use."""
        if not self.is_settled:
            self.abort(reason)
            with self._turn:
                self._drive(0.0)

    def refuse(self, reason: Status) -> None:
        """Settle as ``reason`` what was never begun."""
        self._statuses[self._statuses == Status.PENDING] = reason
        self.is_settled = True

    def _drive(self, deadline: float) -> None:
        """With the turn: receive until it has settled or the time has come; once more than never."""
        while not self.is_settled:
            if self._local.is_closed:
                self.abort(Status.CANCELED)
            if self._outcome is not None:
                self._statuses[self._statuses == Status.PENDING] = self._outcome
                self.is_settled = True
                return
            left = max(deadline - time.monotonic(), 0.0)
            if self._awaited != _GO_ON:
                self._poll.register(self._connection, self._awaited)
                # rounded up: a poll that is too short would be asked again and again
                if not self._poll.poll(int(left * 1000) + (left > 0)):
                    return
            try:
                self._awaited = next(self._exchange)
            except StopIteration:
                self.is_settled = True
            except OSError:
                self.abort(Status.PEER_LOST)
            if left == 0.0 and self._outcome is None:
                return

    def _ask_and_receive(self, connection: socket.socket, hello: bytes) -> Iterator[int]:
        """Exchange requests for answers; yield, whenever that would block, what must happen first."""
        if (error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) != 0:
            raise OSError(error, os.strerror(error))
        pending = np.flatnonzero(self._statuses == Status.PENDING)
        for first in range(0, len(pending), wire.MAX_SPANS):
            asked = pending[first : first + wire.MAX_SPANS]
            yield from _send(connection, hello + self._request(asked))
            hello = b""
            for i in asked.tolist():
                yield from self._receive_span(connection, i)

    def _request(self, asked: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bytes:
        rows = np.empty((len(asked), 4), wire.ROW)
        rows[:, 0] = self._region_id
        rows[:, 1:3] = self._spans[asked, 1:]
        rows[:, 3] = NO_WORD if self._words is None else self._words[asked, 0]
        return wire.pack_request_header(len(asked)) + rows.tobytes()

    def _receive_span(self, connection: socket.socket, i: int) -> Iterator[int]:
        local, _, length = self._spans[i].tolist()
        received = 0
        while received < length:
            try:
                n = self._local.receive(connection, local + received, min(length - received, _MAX_RECEIVED))
            except BlockingIOError:
                yield select.POLLIN
                continue
            if n == 0:
                raise ConnectionError("the owner hung up")
            received += n or 0
            yield _GO_ON  # and find there that the memory was closed, if that is why there was none
        trailer = b""
        while len(trailer) < wire.TRAILER.size:
            try:
                more = connection.recv(wire.TRAILER.size - len(trailer))
            except BlockingIOError:
                yield select.POLLIN
                continue
            if not more:
                raise ConnectionError("the owner hung up")
            trailer += more
        was_there, word = wire.TRAILER.unpack(trailer)
        is_good = was_there and (
            self._words is None or self._words[i, 0] == NO_WORD or int(self._words[i, 1]) == word
        )
        self._statuses[i] = Status.OK if is_good else Status.REJECTED


class ToyEndpoint(Endpoint):
    """``_lock`` guards all of it; the connection is closed when no transfer uses it any more."""

    def __init__(
        self, host: str, port: int, grant: Callable[[], Grant], forget: Callable[[ToyEndpoint], None]
    ) -> None:
        self._address = host, port
        self._make_grant = grant
        self._forget = forget
        self._lock = threading.RLock()
        self._grant: Grant | None = None
        self._peer: wire.Half | None = None
        self._connection: socket.socket | None = None
        self._active: ToyTransfer | None = None
        self._is_closed = False
        self._is_dead = False

    @property
    def grant(self) -> Grant:
        """What lets the peer in."""
        with self._lock:
            if self._is_closed:
                raise ClosedError("the endpoint is closed")
            if self._grant is None:
                self._grant = self._make_grant()
            return self._grant

    @property
    def is_expecting(self) -> bool:
        """Whether its peer was let in, and has not come."""
        with self._lock:
            return self._grant is not None and self._grant.connection is None

    def describe(self) -> bytes:
        return wire.Half(*self._address, self.grant.token).pack()

    def bind(self, remote: bytes) -> None:
        peer = wire.Half.unpack(remote)
        with self._lock:
            if self._peer is not None:
                raise TransportError("the endpoint is bound already")
            self._peer = peer

    def attach(self, region: bytes) -> ToyRemoteRegion:
        return ToyRemoteRegion(*wire.unpack_region(region), self)

    def read(
        self, local: MemoryRegion, remote: RemoteRegion, spans: Spans, *, words: Words | None
    ) -> ToyTransfer:
        if not isinstance(local, ToyMemoryRegion):
            raise UsageError("the local region is not registered with this transport")
        if not isinstance(remote, ToyRemoteRegion) or remote.endpoint is not self:
            raise UsageError("the remote region is not attached to this endpoint")
        transfer = ToyTransfer(self, local, remote, check_batch(spans, words))
        with self._lock:
            is_busy = self._active is not None and not self._active.is_settled
            if not (self._is_closed or self._is_dead or is_busy):
                if transfer.is_settled or self._begin(transfer):
                    return transfer
                self._is_dead = True
            reason = Status.CANCELED if self._is_closed or is_busy else Status.PEER_LOST
        transfer.refuse(reason)
        return transfer

    def _begin(self, transfer: ToyTransfer) -> bool:
        hello = b""
        if self._connection is None:
            if self._peer is None:
                return False
            try:
                self._connection = _start_connecting(self._peer)
            except OSError:
                return False
            hello = wire.pack_hello(self._peer.token)
        transfer.begin(self._connection, hello)
        self._active = transfer
        return True

    def give_up(self) -> None:
        """Be done for: the connection is shut down, which wakes who waits for it."""
        with self._lock:
            self._is_dead = True
            if self._connection is not None:
                with suppress(OSError):  # it may not be connected, or not any more
                    self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            active, grant = self._active, self._grant
        if active is not None:
            active.settle(Status.CANCELED)
        if grant is not None:
            grant.close()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
        self._forget(self)


def _start_connecting(peer: wire.Half) -> socket.socket:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    error = connection.connect_ex((peer.host, peer.port))
    if error not in (0, errno.EINPROGRESS):
        connection.close()
        raise OSError(error, os.strerror(error))
    return connection


def _send(connection: socket.socket, message: bytes) -> Iterator[int]:
    unsent = memoryview(message)
    while unsent:
        try:
            unsent = unsent[connection.send(unsent) :]
        except BlockingIOError:
            yield select.POLLOUT
