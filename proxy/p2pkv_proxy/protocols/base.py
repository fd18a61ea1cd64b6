"""What a protocol is, and the answer it gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from p2pkv_proxy.call import Call, Interrupt, Pair
from p2pkv_proxy.engines import Engines, Post
from p2pkv_proxy.events import MAX_EVENT, Events, EventTooLargeError

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"date",
        b"server",
    }
)
"""Headers of a connection, not of an answer; and those that the router sets itself."""

ROUTERS_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params")
"""A client must not say where an engine gets its KV from: a made-up room or address crashes engines, or worse."""


class Answer:
    """A decode's answer, whose first bytes are there. Closing what ``undo`` holds cancels what goes on."""

    def __init__(self, post: Post, *, is_stream: bool) -> None:
        self.post = post
        self.headers = [(name, value) for name, value in post.headers if name not in HOP_BY_HOP]
        """What the client gets of the engine's headers."""
        self.is_stream = is_stream
        kind = next((value for name, value in self.headers if name == b"content-type"), b"nothing")
        if not kind.startswith(b"text/event-stream" if is_stream else b"application/json"):
            # whatever listens there is no engine, or a broken one
            raise post.blame(f"answered with {kind.decode('latin-1')!r:.80}")

    async def whole(self) -> bytes:
        """Return all of an answer that is no stream."""
        return await self.post.read()

    def events(self) -> AsyncIterator[bytes]:
        """Yield a stream in whole events, as they come; raise :class:`InstanceError` if it ends early."""
        return _whole_events(self.post)


class Protocol(ABC):
    """Stateless."""

    @abstractmethod
    async def open(
        self, engines: Engines, call: Call, pair: Pair, undo: AsyncExitStack, interrupt: Interrupt
    ) -> Answer:
        """Have the pair begin to answer.

        Raises :class:`~p2pkv_proxy.call.InstanceError` or :class:`~p2pkv_proxy.call.AnsweredError`. Whatever was begun
        ends with ``undo``.
        """


async def _whole_events(post: Post) -> AsyncIterator[bytes]:
    whole = Events()
    is_done = False
    is_first = True
    async for chunk in post.chunks():
        try:
            events = whole.feed(chunk)
        except EventTooLargeError:
            raise post.blame(f"sent an event of more than {MAX_EVENT} bytes") from None
        if not events:
            continue
        if is_first and events.startswith(b'data: {"error"'):
            raise post.blame(f"began with an error: {events[6:300].decode(errors='replace').strip()}")
        is_first = False
        is_done = is_done or b"data: [DONE]" in events[-64:]
        yield events
    if not is_done or not whole.is_between:
        raise post.blame("ended its answer early")
    post.complete()
