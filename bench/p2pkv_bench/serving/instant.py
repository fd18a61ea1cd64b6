"""An engine that answers at once, to measure what a router adds: ``python -m p2pkv_bench.serving.instant``.

Prints its URL when it listens; ends when its standard input does.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import uvicorn

_HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
_EVENT = b'data: {"id":"cmpl-0","object":"text_completion","choices":[{"index":0,"text":"token"}]}\n\n'
_WHOLE = b'{"choices":[{"index":0,"text":"token"}],"kv_transfer_params":{"remote_block_ids":[1]}}'


class _Asked(msgspec.Struct):
    max_tokens: int = 16
    stream: bool = False


async def answer(
    scope: MutableMapping[str, Any],
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
) -> None:
    """Answer a completion, or say that all is well."""
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    body += message.get("body", b"")
    asked = msgspec.json.decode(body, type=_Asked) if body else _Asked()
    if not asked.stream:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_WHOLE)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": _WHOLE})
        return
    await send(dict(_HEAD))
    for _ in range(asked.max_tokens):
        await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def main() -> None:
    """Serve until standard input ends."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(answer, log_config=None, access_log=False, lifespan="off", ws="none")
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)

    def wait() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="p2pkv-bench-wait", daemon=True).start()
    gc.collect()
    gc.freeze()  # as the router does: pauses of the engine are not what is measured
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
