"""What the router's processes say to each other: length-prefixed msgpack over a socket pair.

All of it is soft state that is said again, or a question with a deadline: where the other side does not read, it is
left out.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from typing import TypeAlias

import msgspec

_log = logging.getLogger(__name__)
_MOST_WAITING = 8 << 20
"""Bytes; a metrics page has some ten thousand."""
_LENGTH_BYTES = 4


class Ready(msgspec.Struct, tag="ready"):
    """A worker listens."""


class Beat(msgspec.Struct, tag="beat"):
    """A heartbeat that the parent has admitted, as it came."""

    packed: bytes


class Loads(msgspec.Struct, tag="loads"):
    """Requests and tokens under way at each instance: a worker's own, or to a worker the sum of the others'."""

    at: dict[str, tuple[int, int]]
    replicas: dict[str, tuple[int, int]] = {}
    """To a worker: what the routers beside this one have there; nothing where they have not said so."""
    n_replicas: int = 0
    """To a worker: how many of these there are."""


class Drain(msgspec.Struct, tag="drain"):
    """An operator has said to one worker that an instance drains, or no longer does."""

    instance: str
    to: bool


class Reload(msgspec.Struct, tag="reload"):
    """All files are to be read again."""


class Ask(msgspec.Struct, tag="ask"):
    """For the metrics: a worker asks for the others', the parent a worker for its own."""

    number: int


class Pages(msgspec.Struct, tag="pages"):
    """The answer."""

    number: int
    texts: list[str]


Message: TypeAlias = Ready | Beat | Loads | Drain | Reload | Ask | Pages
_decoder = msgspec.msgpack.Decoder(Message)


class Pipe:
    """One end. Make it on the loop that uses it, by :meth:`open`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Pipe:
        """Take over one end of a pair."""
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end))

    def send(self, message: Message) -> None:
        """Say something, unless the other side has not read for long."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > _MOST_WAITING:
            _log.warning("another process of the router does not listen")
            return
        packed = msgspec.msgpack.encode(message)
        self._writer.write(len(packed).to_bytes(_LENGTH_BYTES, "little") + packed)

    async def messages(self) -> AsyncIterator[Message]:
        """Yield what the other side says, until it has gone."""
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
                yield _decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        """Hang up."""
        self._writer.transport.abort()
