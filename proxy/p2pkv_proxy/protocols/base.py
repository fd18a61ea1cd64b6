"""What a protocol is, and the answer it gives."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack

from p2pkv._native import EventStream, RelayEnd
from p2pkv_proxy.call import Call, Interrupt, Pair
from p2pkv_proxy.engines import Engines, Post
from p2pkv_proxy.relaying import Client, ClientFailedError, Relay

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

    status = 200
    says_errors = True
    """A stream has a place where it can be said that no more comes."""

    def __init__(self, post: Post, *, is_stream: bool) -> None:
        self.post = post
        self.headers = [(name, value) for name, value in post.headers if name not in HOP_BY_HOP]
        """What the client gets of the engine's headers."""
        self.is_stream = is_stream
        self.pages: object = None
        """What the prefill has said of the prompt's pages, as it came."""
        self._stream = EventStream()
        self._has_events = False
        kind = next((value for name, value in self.headers if name == b"content-type"), b"nothing")
        if not kind.startswith(b"text/event-stream" if is_stream else b"application/json"):
            # whatever listens there is no engine, or a broken one
            raise post.blame(f"answered with {kind.decode('latin-1')!r:.80}")

    async def whole(self) -> bytes:
        """Return all of an answer that is no stream."""
        return await self.post.read()

    async def more(self) -> bytes:
        """Return what there is more of a stream, in whole events; b"" at its end.

        Raises :class:`InstanceError` if it ends early.
        """
        events = b""
        while not events:
            chunk = await self.post.chunk()
            if not chunk:
                self._end()
                return b""
            try:
                events = self._stream.feed(chunk)
            except ValueError:
                raise self.post.blame(f"sent an event of more than {EventStream.MAX_EVENT} bytes") from None
        if not self._has_events and events.startswith(b'data: {"error"'):
            raise self.post.blame(f"began with an error: {events[6:300].decode(errors='replace').strip()}")
        self._has_events = True
        return events

    async def pass_on(self, relay: Relay, client: Client) -> None:
        """Have the rest of a stream passed on natively, as far as that can be done now.

        Raises :class:`InstanceError`, and :class:`ClientFailedError`.
        """
        connection = self.post.connection
        lent = connection.lend()
        if lent is None:
            return
        try:
            await asyncio.sleep(0)  # at the end of its turn the loop sends what was written
            end = await relay.pass_on(*lent, self._stream, client, connection.patience)
        finally:
            connection.resume()
        if end in (RelayEnd.CLIENT_GONE, RelayEnd.CLIENT_SLOW):
            raise ClientFailedError(end)
        if end is not None and (what := _FAULTS.get(end)) is not None:
            raise self.post.blame(what)

    def _end(self) -> None:
        if not self._stream.is_whole:
            raise self.post.blame("ended its answer early")
        self.post.complete()


_FAULTS = {
    RelayEnd.HUNG_UP: "hung up",
    RelayEnd.ENDED_EARLY: "ended its answer early",
    RelayEnd.NO_HTTP: "gave an answer that is no HTTP",
    RelayEnd.TOO_LARGE: f"sent an event of more than {EventStream.MAX_EVENT} bytes",
    RelayEnd.ENGINE_SILENT: "did not answer in time",
}


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
