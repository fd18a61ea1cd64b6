"""The connections to engines: kept between requests, and made anew where an engine has closed one.

One timer ends all waits. One event loop uses it.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time

from p2pkv._native import Patience
from p2pkv.address import split_address
from p2pkv_proxy.connection import Connection, ConnectionFailedError, ShortageError

_KEEP_S = 3.0
"""Less than engines keep theirs (uvicorn: 5 s), so that a request rarely meets one that is being closed."""
_SWEEP_S = 0.1
_OWN_SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class Connections:
    """All connections, by address. Make and close it on the loop that uses it."""

    def __init__(
        self, *, connect_timeout: float, answer_timeout: float, tls: ssl.SSLContext | None = None
    ) -> None:
        """``answer_timeout``: for an engine's next bytes, in seconds. ``tls``: for https, or the system's.

        All of these may be set anew: they hold for what is sent and connected from then on.
        """
        self.tls = tls
        self.loop = asyncio.get_running_loop()
        self.connect_timeout = connect_timeout
        self.answer_timeout = answer_timeout
        self.open: set[Connection] = set()
        self._idle: dict[str, list[Connection]] = {}
        self._timer = self.loop.call_later(_SWEEP_S, self._sweep)

    async def get(self, address: str) -> Connection:
        """Return a connection to ``[http[s]://]HOST:PORT``; give it back by its ``done``.

        Raises :class:`ConnectionFailedError`.
        """
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if not connection.is_closing():
                return connection
        return await self._connect(address)

    async def ask(
        self, address: str, request: bytes, *, patience: Patience | None = None
    ) -> tuple[Connection, int]:
        """Send a request over a connection, as :meth:`get` gives it, and return it with the answer's status.

        If a kept connection ends without a byte of an answer, as where the engine closed it meanwhile, the request goes
        out once more, over a new one. Raises :class:`ConnectionFailedError`.
        """
        connection = await self.get(address)
        while True:
            try:
                connection.send(request, patience=patience)
                return connection, await connection.head()
            except BaseException as error:
                connection.done()
                if not (isinstance(error, ConnectionFailedError) and connection.was_stale):
                    raise
            connection = await self._connect(address)

    async def _connect(self, address: str) -> Connection:
        scheme, _, place = address.rpartition("://")
        host, port = split_address("url", place)
        tls = self._context() if scheme == "https" else None
        connecting = asyncio.ensure_future(
            self.loop.create_connection(lambda: Connection(self, address), host, port, ssl=tls)
        )
        try:
            # not wait_for: before Python 3.12 that may lose a cancellation
            await asyncio.wait({connecting}, timeout=self.connect_timeout)
        except asyncio.CancelledError:
            connecting.add_done_callback(_hang_up)
            connecting.cancel()
            raise
        if not connecting.done():
            connecting.add_done_callback(_hang_up)
            connecting.cancel()
            raise ConnectionFailedError("did not answer in time")
        try:
            return connecting.result()[1]
        except ssl.SSLError as error:
            raise ConnectionFailedError(
                f"can't be spoken to by TLS: {error.strerror or error}"[:300]
            ) from error
        except OSError as error:
            if error.errno in _OWN_SHORTAGE:
                raise ShortageError(
                    f"can't be connected to, the router is short: {error.strerror}"
                ) from error
            raise ConnectionFailedError(f"can't be reached: {error.strerror or error}") from error
        except UnicodeError as error:
            raise ConnectionFailedError(f"can't be reached, {host!r} is no name of a host") from error

    def _context(self) -> ssl.SSLContext:
        if self.tls is None:
            self.tls = ssl.create_default_context()
        return self.tls

    def keep(self, connection: Connection) -> None:
        """Take a connection for the next request. Called by it."""
        connection.idle_since = time.monotonic()
        self._idle.setdefault(connection.address, []).append(connection)

    def forget(self, connection: Connection) -> None:
        """Don't use a connection any more. Called by it when it has ended."""
        idle = self._idle.get(connection.address)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def close(self) -> None:
        """Hang up on everybody."""
        self._timer.cancel()
        for connection in list(self.open):
            connection.fail("was not waited for: the router ends")

    def _sweep(self) -> None:
        """End waits that are over, and connections that nobody has used for long."""
        self._timer = self.loop.call_later(
            _SWEEP_S, self._sweep
        )  # first: it must go on whatever happens below
        now = time.monotonic()
        for connection in list(self.open):
            if connection.waiting_since and now - connection.waiting_since > connection.patience.now:
                connection.fail("did not answer in time")
        for address, idle in list(self._idle.items()):
            while idle and now - idle[0].idle_since > _KEEP_S:
                idle.pop(0).hang_up()
            if not idle:
                del self._idle[address]


def _hang_up(connecting: asyncio.Task[tuple[asyncio.Transport, Connection]]) -> None:
    """End a connection that nobody waits for any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[1].hang_up()
