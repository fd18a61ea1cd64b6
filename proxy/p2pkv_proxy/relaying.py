"""Passing streams on natively: behind the first event the router has nothing to say to them but when they end.

Clients and engines stay where they are, in the event loop; while a stream is passed on the loop reads nothing from its
engine and writes nothing to its client, but hears when the client hangs up.
"""

from __future__ import annotations

import asyncio

from p2pkv import _native
from p2pkv._native import AnswerBody, EventStream, Patience, RelayEnd

_SWEEP_S = 0.1


class ClientFailedError(Exception):
    """The client has gone, or does not take its answer in time."""

    def __init__(self, end: RelayEnd) -> None:
        super().__init__(end.name)
        self.is_gone = end is RelayEnd.CLIENT_GONE


class Client:
    """The connection to a client whose answer has begun."""

    def __init__(self, transport: asyncio.Transport, patience: float) -> None:
        """``patience``: for it to take what was sent to it, in seconds."""
        self._transport = transport
        self.patience = patience

    @property
    def descriptor(self) -> int | None:
        """Its descriptor if it has taken all that was written, and may be written to by others; else None.

        Under TLS it never may: what is written there by others would go out as it is.
        """
        transport = self._transport
        if transport.get_extra_info("ssl_object") is not None:
            return None
        if transport.is_closing() or transport.get_write_buffer_size() > 0:
            return None
        found: int = transport.get_extra_info("socket").fileno()
        return found if found >= 0 else None

    def write(self, data: bytes) -> None:
        """Send what others have left."""
        if data and not self._transport.is_closing():
            self._transport.write(data)


class Relay:
    """Streams on their way. Make and close it on the loop that uses it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._native = _native.Relay()
        self._waiting: dict[int, asyncio.Future[RelayEnd]] = {}
        self.n_streams = 0
        """Passed on so far."""
        self._loop.add_reader(self._native.fd, self._run)
        self._timer = self._loop.call_later(_SWEEP_S, self._sweep)

    def __len__(self) -> int:
        """Return how many streams are passed on now."""
        return len(self._native)

    async def pass_on(
        self, engine: int, body: AnswerBody, events: EventStream, client: Client, patience: Patience
    ) -> RelayEnd | None:
        """Pass the rest of a stream on, and return how it has ended; None if it can't be passed on now.

        ``patience``: for the engine's next bytes; it may change meanwhile. Whatever ends the wait, the client may be
        written to when it has ended.
        """
        descriptor = client.descriptor
        if descriptor is None:
            return None
        name = self._native.add(engine, descriptor, body, events, patience, client.patience)
        if not name:
            return None
        self.n_streams += 1
        ended: asyncio.Future[RelayEnd] = self._loop.create_future()
        self._waiting[name] = ended
        try:
            return await ended
        finally:
            del self._waiting[name]
            client.write(self._native.remove(name))

    def close(self) -> None:
        """Pass nothing on any more; all who wait have ended."""
        self._timer.cancel()
        self._loop.remove_reader(self._native.fd)

    def _run(self) -> None:
        self._tell(self._native.run())

    def _sweep(self) -> None:
        self._timer = self._loop.call_later(_SWEEP_S, self._sweep)
        self._tell(self._native.sweep())

    def _tell(self, ended: list[tuple[int, RelayEnd]]) -> None:
        for name, end in ended:
            waiter = self._waiting.get(name)
            if waiter is not None and not waiter.done():
                waiter.set_result(end)
