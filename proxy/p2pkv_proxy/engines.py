"""The HTTP client side: requests to engines, with every wait bounded and every failure named.

Nothing in an answer is changed. Connections are kept for less than engines keep theirs (uvicorn: 5 s), so that a
request rarely meets one that is being closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING

import aiohttp
from yarl import URL

from p2pkv.heartbeat import Role
from p2pkv_proxy.call import AnsweredError, Call, InstanceError, Interrupt
from p2pkv_proxy.registry import Tracked
from p2pkv_proxy.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Self

_KEEP_S = 3.0
_BUSY = frozenset({429, 503})
"""An engine that says so is healthy; another one may have room."""
_MAX_ERROR_BYTES = 1 << 16


class Engines:
    """The client session. Close it on the loop it was made on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._urls: dict[tuple[str, str], URL] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S, ttl_dns_cache=30),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout, sock_read=settings.answer_timeout
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            read_bufsize=1 << 18,
        )

    async def close(self) -> None:
        """Hang up on everybody."""
        await self._session.close()

    def post(self, tracked: Tracked, call: Call, body: bytes, interrupt: Interrupt) -> Post:
        """Prepare a request to an instance; use it in an ``async with``, which sends it and counts it there."""
        key = tracked.instance.url, call.path
        url = self._urls.get(key)
        if url is None:
            if len(self._urls) > 10_000:
                self._urls.clear()
            url = self._urls[key] = URL(tracked.instance.url + call.path, encoded=True)

        def send() -> Awaitable[aiohttp.ClientResponse]:
            return self._session.post(url, data=body, headers=call.headers, allow_redirects=False)

        return Post(tracked, send, call, interrupt, self._settings.max_answer)

    async def get(self, tracked: Tracked, path: str, timeout: float) -> tuple[int, str, bytes]:
        """Return status, content type and body of a small page. Raises :class:`InstanceError`."""
        try:
            async with self._session.get(
                tracked.instance.url + path,
                timeout=aiohttp.ClientTimeout(total=timeout),
                allow_redirects=False,
            ) as response:
                return response.status, response.content_type, await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise InstanceError(tracked, _reason(error)) from error


class Post:
    """A request at one instance. What goes wrong becomes :class:`InstanceError` or :class:`AnsweredError`."""

    def __init__(
        self,
        tracked: Tracked,
        request: Callable[[], Awaitable[aiohttp.ClientResponse]],
        call: Call,
        interrupt: Interrupt,
        max_answer: int,
    ) -> None:
        self.tracked = tracked
        self._request = request
        self._max_answer = max_answer
        # a prefill's work is what it must compute, a decode's what it must keep and generate
        prompt = call.prompt
        is_prefill = tracked.instance.role is Role.PREFILL
        n_tokens = prompt.n_to_compute + 1 if is_prefill else prompt.n_tokens + prompt.max_tokens
        self._attempt = tracked.begin(n_tokens, time.monotonic(), lambda: interrupt(tracked))
        self.response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> Self:
        return self

    async def send(self) -> aiohttp.ClientResponse:
        """Send it and wait for the head of a good answer."""
        try:
            self.response = response = await self._request()
            if response.status != 200:
                await self._refused(response)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise self._failed(_reason(error)) from error
        return response

    async def read(self) -> bytes:
        """Return the whole answer."""
        chunks = []
        n_bytes = 0
        async for chunk in self.chunks():
            n_bytes += len(chunk)
            if n_bytes > self._max_answer:
                raise self._failed(f"sent an answer of more than {self._max_answer} bytes")
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the answer as it comes."""
        assert self.response is not None
        try:
            async for chunk in self.response.content.iter_any():
                self.tracked.answered(self._attempt)
                yield chunk
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise self._failed(_reason(error)) from error

    def blame(self, what: str) -> InstanceError:
        """Count a failure of the instance that only a reader of its answer can see."""
        return self._failed(what)

    async def _refused(self, response: aiohttp.ClientResponse) -> None:
        body = await response.content.read(_MAX_ERROR_BYTES)
        status = response.status
        if status in _BUSY:
            self.tracked.end(self._attempt, time.monotonic())
            raise InstanceError(
                self.tracked, f"is busy (status {status})", status=status, body=body, is_fault=False
            )
        if 400 <= status < 500 and status != 408:
            self.tracked.answered(self._attempt)
            raise AnsweredError(status, response.headers.get("content-type", "application/json"), body)
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
        if self.response is None:
            return
        if self.response.content.at_eof():
            self.response.release()
        else:
            self.response.close()  # the engine sees that nobody reads any more, and stops computing


def _reason(error: BaseException) -> str:
    if isinstance(error, (asyncio.TimeoutError, aiohttp.ServerTimeoutError)):
        return "did not answer in time"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"can't be reached: {error.os_error.strerror or error.os_error}"
    if isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionError)):
        return "hung up"
    return f"failed: {type(error).__name__}: {error}"[:300]
