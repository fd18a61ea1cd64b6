"""Clients of a router: good ones who judge what they get, and bad ones beside them.

Every prompt is asked for once, so that an answer says whose it is: one that went to somebody else, that is longer or
shorter than it claims, or that only looks whole, is seen.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp

from fake_answers import tokens_of
from fake_engines import FAILURE
from hunts.frame import Broken, Tally

_PATH = "/v1/completions"
_POST = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
_TOLD = frozenset({404, 429, 502, 503, 504})
"""Statuses that tell a client that it has no answer. 404: all that were left said so."""
_LARGE = 10_000
"""Tokens of an answer that is more than the buffers of a client that reads nothing."""
LARGE = 4000
"""Bytes of a body that is large here: more than good clients send."""
_CROWD = 40
"""Connections that one client opens at once, and says nothing on."""


class Clients:
    """One good client after another, and bad ones beside them."""

    def __init__(self, rng: random.Random, tally: Tally, url: str, session: aiohttp.ClientSession) -> None:
        self._rng = rng
        self._tally = tally
        self._url = url
        self._address = (urlsplit(url).hostname, urlsplit(url).port)
        self._session = session
        self._n = 0
        words = [f"{rng.randrange(10**6):06} " for _ in range(200)]
        self._beginnings = ["", *("".join(words[: rng.randrange(200)]) for _ in range(3))]
        self._open: list[asyncio.StreamWriter] = []
        self._bad: list[Callable[[], Awaitable[None]]] = [
            self._leaves,
            self._reads_nothing,
            self._pipelines,
            self._trickles,
            self._talks_nonsense,
            self._asks_nonsense,
            self._crowds,
            self._weighs,
        ]

    async def good(self) -> None:
        """Ask for an answer, and judge what comes."""
        self._n += 1
        prompt = f"{self._rng.choice(self._beginnings)}prompt {self._n}"
        n_tokens, is_stream = self._rng.randint(1, 20), self._rng.random() < 0.6
        # greedy streams go on elsewhere, and go through Python for that; the others are passed on natively
        temperature = self._rng.choice([0, 1])
        body = {"prompt": prompt, "max_tokens": n_tokens, "stream": is_stream, "temperature": temperature}
        expected = "".join(tokens_of(prompt, n_tokens))
        try:
            async with self._session.post(self._url + _PATH, json=body) as answer:
                raw = await answer.read()
                status = answer.status
        except aiohttp.ClientPayloadError:
            if is_stream:
                raise Broken(f"the stream to {prompt[-20:]!r} ended without a word") from None
            self._tally["told"] += 1
            return
        if status in _TOLD or (status == 500 and raw == FAILURE):
            self._tally["told"] += 1
        elif status != 200:
            raise Broken(f"{prompt[-20:]!r} was answered with status {status}: {raw[:300]!r}")
        elif is_stream:
            self._judge_stream(prompt, raw, expected)
        elif json.loads(raw)["choices"][0]["text"] != expected:
            raise Broken(f"{prompt[-20:]!r} was answered with {raw[:300]!r}, not {expected[:100]!r}")
        else:
            self._tally["whole"] += 1

    def _judge_stream(self, prompt: str, raw: bytes, expected: str) -> None:
        events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
        is_done = events[-1] == b"[DONE]"
        told = [json.loads(event) for event in events if event != b"[DONE]"]
        text = "".join(event["choices"][0]["text"] for event in told if "choices" in event)
        has_error = any("error" in event for event in told)
        if is_done == has_error or (text != expected if is_done else not expected.startswith(text)):
            raise Broken(
                f"the stream to {prompt[-20:]!r} was {raw[:300]!r} ... {raw[-300:]!r}, for {expected!r}"
            )
        self._tally["whole" if is_done else "told"] += 1

    async def bad(self) -> None:
        """Misbehave in one way or another."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._rng.choice(self._bad)()
            self._tally["bad clients"] += 1

    def leave(self) -> None:
        """Have all bad clients that are still there hang up."""
        for writer in self._open:
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, self._address)
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        self._open.append(writer)
        return reader, writer

    def _request(self, n_tokens: int) -> bytes:
        self._n += 1
        is_stream = self._rng.random() < 0.5
        body = json.dumps({"prompt": f"bad {self._n}", "max_tokens": n_tokens, "stream": is_stream}).encode()
        return _POST % (_PATH.encode(), len(body), body)

    async def _leaves(self) -> None:
        reader, writer = await self._connect()
        request = self._request(self._rng.choice([20, _LARGE]))
        _send(writer, request[: self._rng.randint(1, len(request))] if self._rng.random() < 0.3 else request)
        if self._rng.random() < 0.5:
            await asyncio.wait({asyncio.ensure_future(reader.read(100))}, timeout=0.2)
        writer.transport.abort()

    async def _reads_nothing(self) -> None:
        _, writer = await self._connect()
        _send(writer, self._request(_LARGE))

    async def _pipelines(self) -> None:
        _, writer = await self._connect()
        _send(writer, b"".join(self._request(5) for _ in range(self._rng.randint(2, 60))))

    async def _trickles(self) -> None:
        _, writer = await self._connect()
        request = self._request(5)
        for byte in request[: self._rng.randint(1, 40)]:
            _send(writer, bytes([byte]))
            await asyncio.sleep(0)

    async def _talks_nonsense(self) -> None:
        _, writer = await self._connect()
        _send(writer, self._rng.randbytes(self._rng.randint(1, 3000)))

    async def _asks_nonsense(self) -> None:
        reader, writer = await self._connect()
        body = self._rng.choice([b"", b"{", b"[]", b'{"prompt": {}}', b'{"prompt": "a", "n": "two"}'])
        _send(writer, b"\r\n" * self._rng.randrange(3) + _POST % (_PATH.encode(), len(body), body))
        head = await reader.readuntil(b"\r\n")
        if b" 400 " not in head:
            raise Broken(f"{body!r} was answered with {head!r}")

    async def _crowds(self) -> None:
        for _ in range(_CROWD):
            await self._connect()

    async def _weighs(self) -> None:
        body = b'{"prompt": "a"}' + b" " * self._rng.randint(LARGE, 3 * LARGE)
        for _ in range(self._rng.randint(1, 4)):
            _, writer = await self._connect()
            request = _POST % (_PATH.encode(), len(body), body)
            _send(
                writer, request if self._rng.random() < 0.5 else request[: self._rng.randrange(len(request))]
            )


def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send to a router that may have hung up already, of which uvloop makes an error of the program."""
    if writer.transport.is_closing():
        raise ConnectionResetError
    writer.write(data)
