"""What of a client's request goes on to engines: its headers, its body, and the id that all know it by."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from p2pkv_proxy.bodies import Scope
from p2pkv_proxy.call import Call
from p2pkv_proxy.prompts import Body, Prompt, decode_body, read_chat, read_completion, read_generate
from p2pkv_proxy.protocols.base import HOP_BY_HOP, ROUTERS_FIELDS

READERS: dict[str, Callable[[Body], Prompt]] = {
    "/v1/completions": read_completion,
    "/v1/chat/completions": read_chat,
    "/generate": read_generate,
}
_NOT_FORWARDED = HOP_BY_HOP | {
    b"host",
    b"expect",
    b"accept-encoding",
    b"content-type",
    b"x-request-id",
    b"x-upgrd",
    b"x-p2pkv-explain",
}
_SAFE_ID = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-._~:+/=@")
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
_MOST_SESSION = 256


def read_call(scope: Scope, raw: bytes, authorization: bytes | None = None) -> Call:
    """Understand a request with the body ``raw``.

    ``authorization``: what engines are told instead of the client's; b"": nothing.
    Raises :class:`~p2pkv_proxy.prompts.MalformedError`.
    """
    path = scope["path"]
    body = decode_body(raw)
    prompt = READERS[path](body)
    for name in ROUTERS_FIELDS:
        body.pop(name, None)
    headers, request_id = for_engines(scope, authorization)
    prompt.session = _session(scope, body)
    return Call(path, body, prompt, headers, request_id)


def for_engines(scope: Scope, authorization: bytes | None) -> tuple[list[tuple[bytes, bytes]], str]:
    """Return the headers that go on to engines, and the request's id. ``authorization`` as above."""
    headers = [(b"authorization", authorization)] if authorization else []
    request_id = ""
    dropped = _NOT_FORWARDED if authorization is None else _NOT_FORWARDED | {b"authorization"}
    for name, value in scope["headers"]:
        if name == b"connection" and value not in (b"keep-alive", b"close"):
            # it names further headers that are the connection's
            dropped = dropped.union(word.strip().lower() for word in value.split(b","))
    for header in scope["headers"]:
        if header[0] == b"x-request-id":
            request_id = header[1].decode("latin-1")
        elif header[0] not in dropped:
            headers.append(header)
    if not 0 < len(request_id) <= 128 or not _SAFE_ID.issuperset(request_id):
        request_id = str(uuid.uuid4())
    return headers, request_id


def priority_of(scope: Scope) -> int:
    """Return how urgent a client says that its request is, among its own: the lowest number goes first."""
    for name, value in scope["headers"]:
        if name == b"x-request-priority" and len(value) <= 6 and value.removeprefix(b"-").isdigit():
            return int(value)
    return 0


def line_of(call: Call) -> str:
    """Return what requests have in common that wait for the same instances."""
    kind = "generate" if call.path == "/generate" else "one" if call.raw is not None else ""
    return f"{kind} {call.prompt.model}"


def _session(scope: Scope, body: Body) -> str:
    """Return what the client says that its request belongs to: a header, or one of OpenAI's fields."""
    for name, value in scope["headers"]:
        if name == b"x-session-id":
            return str(value[:_MOST_SESSION].decode("latin-1"))
    named = (body.get(field) for field in _SESSION_FIELDS)
    return next((name[:_MOST_SESSION] for name in named if isinstance(name, str) and name), "")
