"""HTTP/1.1 to an engine over one connection: an answer's head and the parts of its body, every wait bounded.

Heads are parsed by httptools, bodies natively, so that the rest of a body can be handed to who passes it on natively.
This is most of what the router does for a request, so it does no more than a router needs: no redirects, cookies or
compression. One event loop uses it.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from typing import Protocol, cast

import httptools

from p2pkv._native import AnswerBody, Patience

Headers = list[tuple[bytes, bytes]]
"""Names in lower case."""

_MAX_WAITING_BYTES = 1 << 18
"""Of an answer that nobody has taken yet; then the engine has to wait."""
_MAX_HEADER_BYTES = 1 << 16
_HEAD_END = b"\r\n\r\n"

_KEEP_ALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 4),
)
"""Seconds until a silent host is asked whether it is there, between questions, and how many may be lost."""


class ConnectionFailedError(Exception):
    """There is no answer, or no more of it; the message says why, and fits behind the engine's name."""


class ShortageError(ConnectionFailedError):
    """There is no connection for want of something here, such as descriptors: no fault of the engine."""


class HungUpError(ConnectionFailedError):
    """The engine ended the connection."""


class Owner(Protocol):
    """Who has made a connection, and keeps it between requests."""

    loop: asyncio.AbstractEventLoop
    answer_timeout: float
    """For an engine's next bytes, in seconds."""
    open: set[Connection]
    """All that have not ended."""

    def keep(self, connection: Connection) -> None:
        """Take a connection for the next request."""

    def forget(self, connection: Connection) -> None:
        """Don't use a connection any more: it has ended."""


class Connection(asyncio.Protocol):
    """One connection, and the answer that it has the parts of."""

    def __init__(self, owner: Owner, address: str) -> None:
        self._owner = owner
        self.address = address
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.waiting_since = 0.0
        """0 while nobody waits."""
        self.patience = Patience(owner.answer_timeout)
        """It says how long the engine's next bytes are waited for, of the request it has."""
        self.idle_since = 0.0
        self._error: ConnectionFailedError | None = None
        self._is_used = False
        self._n_requests = 0
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        """Of the answer; 0 until its head is there."""
        self.headers: Headers = []
        self._head = b""
        """What there is of the answer's head."""
        self._n_head_bytes = 0
        self._parser: httptools.HttpResponseParser | None = None
        """Of the head; one each, since what is behind it is not for it."""
        self.body: AnswerBody | None = None
        """Where the answer's body ends; there with its head."""
        self._parts: deque[bytes] = deque()
        self._n_bytes = 0
        self._is_paused = False
        self._has_heard = False
        self._is_kept = False

    def send(self, request: bytes, *, patience: Patience | None = None) -> None:
        """Send a request. The answer to the one before was read to its end.

        ``patience``: for the engine's next bytes; by default the connections' ``answer_timeout``. Raises
        :class:`ConnectionFailedError` if the connection has ended by then: a listener that dies ends those that nobody
        has accepted, between the turn of the loop that made one and the turn that uses it.
        """
        assert self._transport is not None
        self._begin()
        self.patience = Patience(self._owner.answer_timeout) if patience is None else patience
        self._is_used = True
        self._n_requests += 1
        if self.is_closing():  # under uvloop writing would be an error of another kind
            self._error = self._error or HungUpError("hung up")
            raise self._error
        self._transport.write(request)

    async def head(self) -> int:
        """Wait for the answer's status and headers; return the status. Raises :class:`ConnectionFailedError`."""
        while not self.status:
            await self._wait()
        return self.status

    async def part(self) -> bytes:
        """Return what there is more of the body, as soon as there is; b"" at its end.

        Raises :class:`ConnectionFailedError` if it ends early.
        """
        while not self._parts:
            if self._is_complete():
                return b""
            await self._wait()
        part = self._parts.popleft() if len(self._parts) == 1 else self._joined()
        self._n_bytes = 0
        self._resume()
        return part

    async def read(self, most: int) -> bytes:
        """Return the first ``most`` bytes of the body."""
        found = bytearray()
        while len(found) < most and (part := await self.part()):
            found += part
        return bytes(found[:most])

    def lend(self) -> tuple[int, AnswerBody] | None:
        """Stop reading, and return the descriptor and what must be told of all that is read there until :meth:`resume`.

        None if a part of the body waits here, or no more comes; and under TLS, where others would read ciphertext.
        """
        if self._parts or self.body is None or self.body.is_complete or self.is_closing():
            return None
        assert self._transport is not None
        if self._transport.get_extra_info("ssl_object") is not None:
            return None
        self._pause()
        return self._transport.get_extra_info("socket").fileno(), self.body

    def resume(self) -> None:
        """Read again."""
        self._resume()

    def done(self) -> None:
        """Keep the connection if its answer is complete, and was taken; hang up otherwise.

        An engine sees that nobody reads any more, and stops computing. Idempotent.
        """
        if not self._is_used:
            return
        self._is_used = False
        is_clean = (
            self.body is not None and not self.body.is_spoilt and not self._parts and self._error is None
        )
        if self._is_complete() and self._is_kept and is_clean:
            self._owner.keep(self)
        else:
            self.hang_up()

    @property
    def was_stale(self) -> bool:
        """Whether it had been kept, and ended without a byte of an answer: the engine closed it, unasked."""
        return self._n_requests > 1 and not self._has_heard and isinstance(self._error, HungUpError)

    def is_closing(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._transport is None or self._transport.is_closing()

    def hang_up(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def fail(self, what: str) -> None:
        """End the wait, and the connection."""
        if self._error is None:
            self._error = ConnectionFailedError(what)
        self._wake()
        self.hang_up()

    def _joined(self) -> bytes:
        part = b"".join(self._parts)
        self._parts.clear()
        return part

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._owner.loop.create_future()
        self.waiting_since = time.monotonic()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self.waiting_since = 0.0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _is_complete(self) -> bool:
        return self.body is not None and self.body.is_complete

    def _pause(self) -> None:
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        _notice_death(transport.get_extra_info("socket"))
        self._owner.open.add(self)

    def data_received(self, data: bytes) -> None:
        if not self._is_used:
            self.fail("said something that it was not asked")
            return
        self._has_heard = True
        try:
            if self.body is None:
                data = self._take_head(data)
            if self.body is not None:
                self._take_body(self.body.feed(data))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError) as error:
            self.fail(f"gave an answer that is no HTTP: {error}"[:300])
        else:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.open.discard(self)
        self._owner.forget(self)
        if self.body is not None and exc is None:
            self.body.close()
        if self._error is None and not self._is_complete():
            self._error = HungUpError("hung up")
        self._wake()

    def _take_head(self, data: bytes) -> bytes:
        """Take what belongs to the head, or those of 1xx before it; return what is behind it."""
        data = self._head + data
        self._head = b""
        while self.body is None and (end := data.find(_HEAD_END) + len(_HEAD_END)) >= len(_HEAD_END):
            self._n_head_bytes += end
            if self._n_head_bytes > _MAX_HEADER_BYTES:
                break
            self.headers.clear()
            self._parser = httptools.HttpResponseParser(self)
            self._parser.feed_data(data[:end])
            data = data[end:]
        if self.body is not None:
            return data
        self._head = data
        if self._n_head_bytes + len(data) > _MAX_HEADER_BYTES:
            self.fail(f"sent more than {_MAX_HEADER_BYTES} bytes of headers")
        return b""

    def _take_body(self, payload: bytes) -> None:
        if not payload:
            return
        self._parts.append(payload)
        self._n_bytes += len(payload)
        if self._n_bytes > _MAX_WAITING_BYTES:
            self._pause()

    # what httptools calls, for a head

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the end of the headers; those of 1xx are no answer yet."""
        assert self._parser is not None
        status: int = self._parser.get_status_code()
        if status >= 200:
            self.status = status
            self.body = AnswerBody(_body_length(status, self.headers))
            self._is_kept = self._parser.should_keep_alive()


def _body_length(status: int, headers: Headers) -> int:
    """Return how long the body is, or how its end will be known. httptools has refused what contradicts itself."""
    if status in (204, 304):
        return 0
    found = dict(headers)
    if (coding := found.get(b"transfer-encoding")) is not None:
        return AnswerBody.CHUNKED if coding.lower().endswith(b"chunked") else AnswerBody.UNTIL_CLOSED
    length = found.get(b"content-length")
    return AnswerBody.UNTIL_CLOSED if length is None else int(length)


def _notice_death(connected: socket.socket) -> None:
    """Have the connection end when the engine's host is gone without a word, though nothing is under way."""
    for option, value in _KEEP_ALIVE:
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
