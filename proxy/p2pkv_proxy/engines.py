"""Requests to engines, with every failure named and counted against the instance whose it is.

Nothing in an answer is changed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from p2pkv._native import Patience
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy.call import AnsweredError, Call, InstanceError, Interrupt
from p2pkv_proxy.connection import Connection, ConnectionFailedError, ShortageError
from p2pkv_proxy.connections import Connections
from p2pkv_proxy.costs import work_of
from p2pkv_proxy.settings import Settings
from p2pkv_proxy.tracked import Tracked

if TYPE_CHECKING:
    from typing_extensions import Self

_BUSY = frozenset({429, 503})
"""An engine that says so is healthy; another one may have room."""
_RANK = b"x-data-parallel-rank"
"""vLLM 0.32 and SGLang 0.5.23 take a request's rank from it; for /generate SGLang does so from the body alone."""
_MAX_ERROR_BYTES = 1 << 16
_MAX_PAGE_BYTES = 1 << 20

Headers = Sequence[tuple[bytes, bytes]]


class Engines:
    """The connections to all instances. Make and close it on the loop that uses it."""

    def __init__(self, settings: Settings, tls: ssl.SSLContext | None = None) -> None:
        """``tls``: whose certificates are believed, of engines with https; by default what the system believes."""
        self._settings = settings
        self._connections = Connections(
            connect_timeout=settings.connect_timeout, answer_timeout=settings.answer_timeout, tls=tls
        )

    def take(self, settings: Settings) -> None:
        """Have other settings hold for requests from now on."""
        self._settings = settings
        self._connections.connect_timeout = settings.connect_timeout
        self._connections.answer_timeout = settings.answer_timeout

    def believe(self, tls: ssl.SSLContext | None) -> None:
        """Believe others from now on, of engines with https; None: whom the system believes."""
        self._connections.tls = tls

    def close(self) -> None:
        """Hang up on everybody."""
        self._connections.close()

    def post(self, tracked: Tracked, call: Call, body: bytes, interrupt: Interrupt) -> Post:
        """Prepare a request to an instance; use it in an ``async with``, which counts it there until its end."""
        return Post(self._connections, tracked, call, body, interrupt, self._settings)

    async def get(
        self, tracked: Tracked, path: str, timeout: float, headers: Headers = ()
    ) -> tuple[int, str, bytes]:
        """Return status, content type and body of a small page. Raises :class:`InstanceError`."""
        getting = asyncio.ensure_future(self._get(tracked, path, headers))
        try:
            await asyncio.wait({getting}, timeout=timeout)
            if getting.done():
                return getting.result()
        except ConnectionFailedError as error:
            is_fault = not isinstance(error, ShortageError)
            raise InstanceError(tracked, str(error), is_fault=is_fault) from error
        finally:
            getting.cancel()
        raise InstanceError(tracked, "did not answer in time")

    async def _get(self, tracked: Tracked, path: str, headers: Headers) -> tuple[int, str, bytes]:
        address = _address(tracked)
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        request = b"GET %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (path.encode(), address.encode(), lines)
        connection, status = await self._connections.ask(tracked.instance.url, request)
        try:
            body = await connection.read(_MAX_PAGE_BYTES)
            return status, _content_type(connection), body
        finally:
            connection.done()


def _address(tracked: Tracked) -> str:
    return tracked.instance.url.partition("://")[2]


def _content_type(connection: Connection) -> str:
    for name, value in connection.headers:
        if name == b"content-type":
            return value.decode("latin-1")
    return "application/json"


class Post:
    """A request at one instance. What goes wrong becomes :class:`InstanceError` or :class:`AnsweredError`."""

    def __init__(
        self,
        connections: Connections,
        tracked: Tracked,
        call: Call,
        body: bytes,
        interrupt: Interrupt,
        settings: Settings,
    ) -> None:
        self.tracked = tracked
        self._connections = connections
        self._call = call
        self._body = body
        self._max_answer = settings.max_answer
        # a prefill's work is what it must compute, a decode's what it must keep and generate
        prompt = call.prompt
        is_prefill = tracked.instance.role is Role.PREFILL
        work = None
        if tracked.instance.role is not Role.DECODE:
            work = work_of(prompt, tracked.id, tracked.instance.node_id)
        n_tokens = prompt.n_to_compute + 1 if is_prefill else prompt.n_tokens + prompt.max_tokens
        # an answer in one piece comes when its last token is made, however long that takes; whether the engine still
        # lives is then its health's and heartbeats' business
        is_prompt = is_prefill or prompt.is_stream
        self._patience = Patience(
            settings.answer_timeout if is_prompt else settings.request_timeout, settings.stalled_after
        )
        self._attempt = tracked.begin(
            n_tokens,
            time.monotonic(),
            lambda: interrupt(tracked),
            patience=self._patience,
            is_prompt=is_prompt,
            n_prompt=prompt.n_tokens,
            work=work,
        )
        self._connection: Connection | None = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The answer's, with names in lower case; there when :meth:`send` has returned."""
        return self.connection.headers

    async def __aenter__(self) -> Self:
        return self

    async def send(self) -> int:
        """Send it and wait for the head of a good answer; return its status."""
        address = _address(self.tracked)
        call = self._call
        head = [
            b"%b %b HTTP/1.1\r\nhost: %b\r\n"
            % (call.method.encode(), call.path.encode("latin-1"), address.encode()),
            *(b"%b: %b\r\n" % header for header in self._headers()),
            b"x-request-id: %b\r\n" % call.request_id.encode(),
            b"content-type: application/json\r\n" if call.raw is None else b"",
            b"content-length: %d\r\n\r\n" % len(self._body) if self._body or call.raw is None else b"\r\n",
        ]
        try:
            request = b"".join((*head, self._body))
            url = self.tracked.instance.url
            self._connection, status = await self._connections.ask(url, request, patience=self._patience)
            if status != 200 and (call.raw is None or not 200 <= status < 300):
                await self._refused(self._connection, status)
        except ShortageError as error:
            self.tracked.end(self._attempt, time.monotonic())
            raise InstanceError(self.tracked, str(error), status=503, is_fault=False) from error
        except ConnectionFailedError as error:
            raise self._failed(str(error)) from error
        return status

    def _headers(self) -> Headers:
        """Return the request's headers, with the rank that is to answer if the instance is one of several."""
        rank = self.tracked.instance.dp_rank
        if rank is None:
            return self._call.headers
        others = [header for header in self._call.headers if header[0] != _RANK]
        return [*others, (_RANK, str(rank).encode())]

    async def read(self) -> bytes:
        """Return the whole answer."""
        chunks = []
        n_bytes = 0
        while chunk := await self.chunk():
            n_bytes += len(chunk)
            if n_bytes > self._max_answer:
                raise self._failed(f"sent an answer of more than {self._max_answer} bytes")
            chunks.append(chunk)
        self.complete()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def chunk(self) -> bytes:
        """Return what there is more of the answer; b"" at its end."""
        assert self._connection is not None
        try:
            chunk = await self._connection.part()
        except ConnectionFailedError as error:
            raise self._failed(str(error)) from error
        if chunk:
            self.tracked.answered(self._attempt, time.monotonic())
        return chunk

    @property
    def connection(self) -> Connection:
        """What the answer comes over; there when :meth:`send` has returned."""
        assert self._connection is not None
        return self._connection

    def complete(self) -> None:
        """Note that the answer is whole: only that speaks for the instance."""
        self.tracked.completed(self._attempt, time.monotonic())

    def blame(self, what: str) -> InstanceError:
        """Count a failure of the instance that only a reader of its answer can see."""
        return self._failed(what)

    async def _refused(self, connection: Connection, status: int) -> None:
        body = await connection.read(_MAX_ERROR_BYTES)
        if status in _BUSY:
            self.tracked.end(self._attempt, time.monotonic())
            raise InstanceError(
                self.tracked, f"is busy (status {status})", status=status, body=body, is_fault=False
            )
        if 400 <= status < 500 and status != 408:
            self.tracked.answered(self._attempt, time.monotonic())
            raise AnsweredError(status, _content_type(connection), body, self.tracked)
        raise self._failed(
            f"answered with status {status}", status=status if status >= 500 else 502, body=body
        )

    def _failed(self, what: str, *, status: int = 502, body: bytes = b"") -> InstanceError:
        self.tracked.end(self._attempt, time.monotonic(), failed=True)
        return InstanceError(self.tracked, what, status=status, body=body)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.tracked.end(self._attempt, time.monotonic())
        if self._connection is not None:
            self._connection.done()
