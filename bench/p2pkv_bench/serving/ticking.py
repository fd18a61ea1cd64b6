"""An engine whose streams have an event every so often, each by itself: ``python -m p2pkv_bench.serving.ticking``.

It does as little as it can, so that the cores are for who passes the events on. Prints its URL when it listens; ends
when its standard input does.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading

_EVENT = b'data: {"id":"cmpl-0","object":"text_completion","choices":[{"index":0,"text":"token"}]}\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_WELL = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_GAP_S = 0.02
"""Between two events of a stream: 50 tokens a second."""


class _Stream(asyncio.Protocol):
    """One connection. Every request with ``max_tokens`` is answered by so many events."""

    def __init__(self) -> None:
        self._heard = b""
        self._n_left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._heard += data
        while (end := self._heard.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._heard[: end + 2])
            behind = end + 4 + (int(length[1]) if length else 0)
            if len(self._heard) < behind:
                return
            asked = _TOKENS.search(self._heard[end:behind])
            self._heard = self._heard[behind:]
            if asked is None:
                self._transport.write(_WELL)
            else:
                self._n_left = int(asked[1])
                self._transport.write(_HEAD + _CHUNK)
                self._next()

    def _next(self) -> None:
        asyncio.get_running_loop().call_later(_GAP_S, self._tick)

    def _tick(self) -> None:
        if self._transport.is_closing():
            return
        self._n_left -= 1
        self._transport.write(_CHUNK if self._n_left > 0 else _END)
        if self._n_left > 0:
            self._next()


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Stream, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def _wait() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_wait, name="p2pkv-bench-wait", daemon=True).start()
    try:
        import uvloop

        uvloop.run(_serve())
    except ImportError:
        asyncio.run(_serve())
