"""The router's process: uvicorn with one event loop, and one line on stdout when it listens."""

from __future__ import annotations

import asyncio
import gc
import math
import socket

import typer
import uvicorn

from p2pkv.descriptors import raise_limit
from p2pkv.errors import ControlError
from p2pkv_proxy.app import App, Plan
from p2pkv_proxy.guarded_http import GuardedProtocol

_LAST_WORDS_S = 5.0
"""For clients to take that their answers were broken off, when the router ends."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: App) -> None:
        super().__init__(config)
        self._app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what is there now stays: no need to look at it again in the middle of requests
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            discovery = self._app.discovery
            where = f", heartbeats on {discovery.address}" if discovery is not None else ""
            typer.echo(f"p2pkv-proxy listens on http://{shown}:{port}{where}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._app.drain_timeout, self._app.end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def serve(plan: Plan, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; requests under way may end first. Raises :class:`ControlError`."""
    raise_limit()
    app = App(plan)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ControlError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    config = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=math.ceil(app.drain_timeout + _LAST_WORDS_S),
        backlog=2048,
    )
    _Server(config, app).run(sockets=[listener])
