"""HTTP servers of tests, on the loop of the test and ports of their own."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    from typing_extensions import Self


class Listening:
    """A uvicorn server on this loop and a port of its own."""

    def __init__(self, app: Any, *, tls: ssl.SSLContext | None = None, **options: Any) -> None:
        self._tls = tls
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, log_config=None, access_log=False, ws="none", **options)
        self.server = uvicorn.Server(config)
        self.server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]

    async def __aenter__(self) -> Self:
        self.server.config.load()
        self.server.config.ssl = self._tls
        self.server.lifespan = self.server.config.lifespan_class(self.server.config)
        await self.server.startup(sockets=[self._socket])
        return self

    def kill(self) -> None:
        """Cut every connection and listen no more, as a killed process does."""
        for server in self.server.servers:
            server.close()
        self._socket.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    async def __aexit__(self, *exc_info: object) -> None:
        self.kill()
        for task in list(self.server.server_state.tasks):
            task.cancel()
        await asyncio.gather(*self.server.server_state.tasks, return_exceptions=True)
        await self.server.lifespan.shutdown()
