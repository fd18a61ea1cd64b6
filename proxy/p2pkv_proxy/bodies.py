"""Reading a request's body within bounds, and answering without one of an engine's answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import msgspec

from p2pkv_proxy.large_bodies import Hold

Scope: TypeAlias = MutableMapping[str, Any]  # ASGI's own words
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class TooLargeError(Exception):
    """The body has more bytes than it may."""


class CrumbledError(Exception):
    """The body comes in more pieces than it may."""


class ClientGoneError(Exception):
    """The client hung up."""


async def read_body(scope: Scope, receive: Receive, most: int, hold: Hold) -> bytes:
    """Return the request's body. Waits as long as the client takes, and for room: the caller bounds that.

    ``hold``: the request's. One that does not say how many bytes come, and has many, takes the most there may be.
    Raises :class:`TooLargeError` and :class:`CrumbledError` as soon as it is known, and :class:`ClientGoneError`.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and (not value.isdigit() or int(value) > most):
            raise TooLargeError
        if name == b"content-length" and not hold.is_enough(int(value)):
            await hold.take(int(value))
    message = await receive()
    chunks = []
    n_bytes = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        if "p2pkv.is_crumbled" in scope:
            raise CrumbledError
        chunk = message.get("body", b"")
        n_bytes += len(chunk)
        if n_bytes > most:
            raise TooLargeError
        if not hold.is_enough(n_bytes):
            await hold.take(most)
        chunks.append(chunk)
        if not message.get("more_body"):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        message = await receive()


def error_body(status: int, message: str) -> bytes:
    """Return an error as OpenAI's API has it."""
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


async def respond(
    send: Send,
    status: int,
    body: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
    content_type: bytes = b"application/json",
) -> None:
    """Send a whole answer."""
    start = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})
