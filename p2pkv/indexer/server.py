"""The indexer over HTTP, on a port of its own.

Connections are kept, and bounded in number. Whether somebody may ask is decided before their body is read.
"""

from __future__ import annotations

import hmac
import json
import socket
import time
from collections.abc import Callable, Mapping
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.metadata import version

from p2pkv.bounded_server import SILENT_S, BoundedServer
from p2pkv.errors import ClosedError, ConfigError
from p2pkv.indexer.indexer import Indexer
from p2pkv.indexer.openapi import description
from p2pkv.indexer.refusal import Refusal
from p2pkv.limited_log import LimitedLog
from p2pkv.served_port import ServedPort

MAX_BODY = 4 << 20
"""8,192 hashes take 600 KB; half a million tokens 4 MB."""
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "[::1]"}


class IndexerServer(ServedPort):
    """Raises :class:`~p2pkv.errors.ConfigError` if it can't listen.

    ``token`` is what who asks has to show; empty: nothing, which is for loopback only. ``count`` is told of each
    request whether it was ``answered``, ``refused`` or ``failed``.
    """

    def __init__(
        self,
        address: tuple[str, int],
        indexer: Indexer,
        *,
        token: str,
        count: Callable[[str], None],
        log: LimitedLog,
    ) -> None:
        host, port = address
        self._token = token
        self._hosts = _LOOPBACK_NAMES | {f"[{host}]" if ":" in host else host}
        self._count = count
        self.log = log
        self._posts: Mapping[str, Callable[[bytes], object]] = {
            "/query": indexer.query,
            "/query_by_hash": indexer.query_by_hash,
            "/register": indexer.register,
            "/unregister": indexer.unregister,
        }
        described = description(version("p2pkv"), needs_token=bool(token))
        self._gets: Mapping[str, Callable[[], object]] = {
            "/health": lambda: {"status": "ok"},
            "/workers": indexer.workers,
            "/openapi.json": lambda: described,
        }
        try:
            self._server = _Listener(self, host, port)
        except OSError as error:
            raise ConfigError(
                f"cannot serve the indexer on {host}:{port}: {error.strerror or error}"
            ) from error
        super().__init__(self._server, "p2pkv-indexer")

    def close(self) -> None:
        """Stop serving, and end connections; waits for their threads. Idempotent."""
        super().close()
        self._server.end_connections()

    def refusal(self, headers: Message[str, str]) -> Refusal | None:
        """Say why who sent these headers is told nothing, if so."""
        if self._token:
            kind, _, given = headers.get("Authorization", "").partition(" ")
            if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token.encode()):
                return None
            return Refusal(
                HTTPStatus.UNAUTHORIZED,
                "the indexer needs the token of indexer_token, as `Authorization: Bearer TOKEN`",
            )
        host = headers.get("Host", "")
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if name not in self._hosts or "Origin" in headers:  # a page on the web, whose name means loopback now
            return Refusal(
                HTTPStatus.FORBIDDEN,
                "without indexer_token only programs on this machine are answered, which name it as "
                f"{min(self._hosts)} and are no web page",
            )
        return None

    def answer(self, method: str, path: str, body: bytes) -> tuple[HTTPStatus, object]:
        """Return the status and the JSON of an answer."""
        try:
            if method == "POST" and path in self._posts:
                status, told = HTTPStatus.OK, self._posts[path](body)
            elif method == "GET" and path in self._gets:
                status, told = HTTPStatus.OK, self._gets[path]()
            elif path in self._posts or path in self._gets:
                wanted = "POST" if path in self._posts else "GET"
                raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {wanted}, not {method}")
            else:
                there = ", ".join([*self._posts, *self._gets])
                raise Refusal(HTTPStatus.NOT_FOUND, f"there is {there}")
        except Refusal as refusal:
            return self.refused(refusal)
        except ClosedError as error:
            return self.refused(Refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error)))
        except Exception as error:  # the top of what a connection's thread does again and again
            self._count("failed")
            self.log.warning("indexer", "a question to the indexer failed: %r", error, exc_info=error)
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "this node failed; its log says why"}
        self._count("answered")
        return status, told

    def refused(self, refusal: Refusal) -> tuple[HTTPStatus, object]:
        """Return the answer to who is refused."""
        self._count("refused")
        return refusal.status, {"error": str(refusal)}


class _Listener(BoundedServer):
    connection_name = "p2pkv-indexer-connection"
    what = "indexer"

    def __init__(self, owner: IndexerServer, host: str, port: int) -> None:
        self.owner = owner
        self.log = owner.log
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SILENT_S
    wbufsize = 1 << 16  # head and body go out together
    disable_nagle_algorithm = True
    server: _Listener
    connection: socket.socket

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is the base's
        """Log nothing: questions come by the thousand."""

    def version_string(self) -> str:
        """Say what answers, and not of which version."""
        return "p2pkv"

    def do_GET(self) -> None:
        """Answer a question without a body."""
        self._handle("GET")

    def do_POST(self) -> None:
        """Answer a question with one."""
        self._handle("POST")

    def _handle(self, method: str) -> None:
        owner = self.server.owner
        self._body_is_read = False
        try:
            refusal = owner.refusal(self.headers)
            if refusal is not None:
                raise refusal
            body = self._body()
            self.server.handles(self.connection, None)
            status, told = owner.answer(method, self.path.partition("?")[0], body)
        except Refusal as refusal:
            status, told = owner.refused(refusal)
        self._send(status, told)
        self.server.handles(self.connection, time.monotonic())

    def _body(self) -> bytes:
        if "Transfer-Encoding" in self.headers:
            raise Refusal(
                HTTPStatus.LENGTH_REQUIRED, "a body needs a Content-Length; it can't come in chunks"
            )
        text = self.headers.get("Content-Length", "0")
        if not (text.isascii() and text.isdigit()) or len(self.headers.get_all("Content-Length", [])) > 1:
            raise Refusal(HTTPStatus.BAD_REQUEST, "Content-Length must be one number")
        if len(text) > 10 or int(text) > MAX_BODY:
            raise Refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a body of {text[:20]} bytes; at most {MAX_BODY} are taken",
            )
        body = self.rfile.read(int(text))
        if len(body) < int(text):
            raise ConnectionResetError("the body ended early")
        self._body_is_read = True
        return body

    def _send(self, status: HTTPStatus, told: object) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if not self._body_is_read:  # what follows on the connection is no request
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
