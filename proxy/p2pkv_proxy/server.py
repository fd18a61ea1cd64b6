"""The router's process: uvicorn with one event loop, and one line on stdout when it listens."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import socket

import typer
import uvicorn

from p2pkv.descriptors import raise_limit
from p2pkv.errors import ControlError
from p2pkv_proxy.app import App
from p2pkv_proxy.guarded_http import GuardedProtocol
from p2pkv_proxy.idle_connections import KEEP_S
from p2pkv_proxy.plan import Plan

LAST_WORDS_S = 5.0
"""For clients to take that their answers were broken off, when the router ends."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: App, *, announce: bool) -> None:
        super().__init__(config)
        self._app = app
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._app.reload)
        gc.collect()
        gc.freeze()  # what is there now stays: no need to look at it again in the middle of requests
        if self.started and sockets and self._announce:
            around = self._app.neighbourhood
            is_tls = self._app.certificate is not None
            shown = shown_address(*sockets[0].getsockname()[:2], is_tls=is_tls)
            where = f", heartbeats on {around.discovery.address}" if around is not None else ""
            typer.echo(f"p2pkv-proxy listens on {shown}{where}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.config.timeout_graceful_shutdown = math.ceil(self._app.drain_timeout + LAST_WORDS_S)
        timer = loop.call_later(self._app.drain_timeout, self._app.end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def shown_address(host: str, port: int, *, is_tls: bool) -> str:
    """Return what clients use."""
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def bound(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that has the address. ``is_shared``: with others of this user that say so as well.

    Raises :class:`ControlError`.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ControlError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def serve(plan: Plan, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; requests under way may end first. Raises :class:`ControlError`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what is in files is being read anyhow
    app = App(plan)
    app.take_heartbeats()
    try:
        listener = bound(host, port)
    except ControlError:
        app.close()
        raise
    serve_on(app, listener, announce=True)


def serve_on(app: App, listener: socket.socket, *, announce: bool) -> None:
    """Serve on a bound socket. ``announce``: say on stdout when it listens."""
    raise_limit()
    config = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_S,
        backlog=2048,
    )
    config.load()
    if app.certificate is not None:
        config.ssl = (
            app.certificate.context
        )  # ours, since it has another certificate when the files have changed
    _Server(config, app, announce=announce).run(sockets=[listener])
