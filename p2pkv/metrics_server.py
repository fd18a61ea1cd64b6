"""The HTTP side of a node: ``/metrics`` for Prometheus, ``/healthz`` and ``/readyz`` for whoever restarts it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import ProcessCollector

from p2pkv.bounded_server import SILENT_S, BoundedServer
from p2pkv.errors import ConfigError
from p2pkv.exposition import Exposition
from p2pkv.limited_log import LimitedLog
from p2pkv.metrics import Metrics
from p2pkv.served_port import ServedPort

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


_log = logging.getLogger(__name__)
_CONNECTION = "p2pkv.connection"
"""What a question's environment calls the socket that it came over."""


class _Server(BoundedServer, WSGIServer):
    connection_name = "p2pkv-metrics-connection"
    what = "metrics server"
    log = LimitedLog(_log)


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    timeout = SILENT_S
    connection: socket.socket

    def get_environ(self) -> WSGIEnvironment:
        """Have an answer know for whom it is made."""
        return {**super().get_environ(), _CONNECTION: self.connection}

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is the base's
        """Log nothing: a scrape every few seconds is no news."""


@dataclass(frozen=True, slots=True)
class Page:
    """An answer over HTTP; text is UTF-8."""

    status: str
    kind: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class MetricsServer(ServedPort):
    """Answers each request on a thread of its own, of as many at once as a :class:`BoundedServer` has room for.

    ``not_ready`` says why this node should not be given work, or None. ``more`` answers what else is served here, and
    returns None for what is not. Raises :class:`ConfigError` if the port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Metrics,
        not_ready: Callable[[], str | None],
        more: Callable[[Mapping[str, object]], Page | None] = lambda _: None,
    ) -> None:
        self._exposition = Exposition(metrics, (ProcessCollector(registry=None),))
        self._more = more
        self._not_ready = not_ready
        try:
            self._server: _Server = make_server(
                host, port, self._answer, _ServerV6 if ":" in host else _Server, handler_class=_Quiet
            )
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error
        super().__init__(self._server, "p2pkv-metrics")

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        connection = environ[_CONNECTION]
        self._server.handles(connection, None)
        try:
            page = self._page(environ["PATH_INFO"], environ)
        finally:  # who does not read his answer may have to go for others
            self._server.handles(connection, time.monotonic())
        kind = page.kind if "charset" in page.kind else f"{page.kind}; charset=utf-8"
        start_response(page.status, [("Content-Type", kind), *page.headers.items()])
        return [page.body]

    def close(self) -> None:
        """Stop serving, and end connections; waits for their threads. Idempotent."""
        super().close()
        self._server.end_connections()

    def _page(self, path: str, environ: WSGIEnvironment) -> Page:
        if path == "/metrics":
            kind, text = self._exposition.write(environ.get("HTTP_ACCEPT", ""))
            return Page("200 OK", kind, text)
        if path == "/healthz":
            return _text("200 OK", "ok")
        if path == "/readyz":
            reason = self._not_ready()
            return _text("200 OK", "ready") if reason is None else _text("503 Service Unavailable", reason)
        return self._more(environ) or _text("404 Not Found", "there is /, /metrics, /healthz and /readyz")


def _text(status: str, text: str) -> Page:
    return Page(status, "text/plain", f"{text}\n".encode())
