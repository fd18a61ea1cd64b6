"""The HTTP side of a node: ``/metrics`` for Prometheus, ``/healthz`` and ``/readyz`` for whoever restarts it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from p2pkv.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


class _Server(ThreadingWSGIServer):
    pass


class _ServerV6(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is the base's
        """Log nothing: a scrape every few seconds is no news."""


class MetricsServer:
    """Serves from construction to :meth:`close`, on threads of its own.

    ``not_ready`` says why this node should not be given work, or None.
    Raises :class:`ConfigError` if the port is taken.
    """

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, not_ready: Callable[[], str | None]
    ) -> None:
        self._metrics = make_wsgi_app(registry)
        self._not_ready = not_ready
        try:
            self._server = make_server(
                host, port, self._answer, _ServerV6 if ":" in host else _Server, handler_class=_Quiet
            )
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="p2pkv-metrics", daemon=True)
        self._thread.start()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            page: Iterable[bytes] = self._metrics(environ, start_response)
            return page
        status, text = "404 Not Found", "there is /metrics, /healthz and /readyz"
        if path == "/healthz":
            status, text = "200 OK", "ok"
        elif path == "/readyz":
            reason = self._not_ready()
            status, text = ("200 OK", "ready") if reason is None else ("503 Service Unavailable", reason)
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    def close(self) -> None:
        """Stop serving; waits for the thread. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
