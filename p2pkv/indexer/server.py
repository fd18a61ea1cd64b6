"""The indexer over HTTP, on a port of its own.

Connections are kept, bounded in number, and each has a thread. When there is no room for one more, that goes which has
had nothing answered for longest: who connects and says nothing, or slowly, keeps nobody out. Whether somebody may ask
is decided before their body is read.
"""

from __future__ import annotations

import hmac
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.metadata import version
from socketserver import TCPServer
from typing import Any

from p2pkv.errors import ClosedError, ConfigError
from p2pkv.indexer.indexer import Indexer
from p2pkv.indexer.openapi import description
from p2pkv.indexer.refusal import Refusal
from p2pkv.limited_log import LimitedLog
from p2pkv.served_port import ServedPort

MAX_CONNECTIONS = 64
MAX_BODY = 4 << 20
"""8,192 hashes take 600 KB; half a million tokens 4 MB."""
SILENT_S = 30.0
"""How long a kept connection may say nothing, and a body or an answer may stand still."""
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "[::1]"}


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    thread: threading.Thread
    waits_since: float | None
    """Since when nothing of it was answered; None while an answer is made."""


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


class _Listener(TCPServer):
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, owner: IndexerServer, host: str, port: int) -> None:
        self.owner = owner
        self._lock = threading.Lock()  # guards the next one
        self._connections: dict[int, _Connection] = {}  # by descriptor
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name="p2pkv-indexer-connection", daemon=True
        )
        with self._lock:
            if len(self._connections) >= MAX_CONNECTIONS and not self._make_room():
                request.close()
                return
            thread.start()  # first, since it may fail; what the thread does with its connection waits for the lock
            self._connections[request.fileno()] = _Connection(request, thread, time.monotonic())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say why a connection was not taken, which the base has closed."""
        self.owner.log.warning(
            "connection", "the indexer did not take a connection", exc_info=sys.exc_info()[1]
        )

    def _make_room(self) -> bool:
        """End the connection that waits longest; False if all are being answered."""
        waiting = [
            (each.waits_since, key) for key, each in self._connections.items() if each.waits_since is not None
        ]
        if not waiting:
            return False
        longest = self._connections[min(waiting)[1]]
        longest.waits_since = None  # the next one that comes ends another
        _end(longest.socket)
        return True

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        number = request.fileno()
        try:
            self.finish_request(request, client_address)
        except OSError:
            pass  # it has gone, or was ended
        finally:
            with self._lock:
                del self._connections[number]
                request.close()  # within the lock: its number is another's from here on

    def handles(self, request: socket.socket, waits_since: float | None) -> None:
        """Note since when a connection waits, or that it is being answered."""
        with self._lock:
            self._connections[request.fileno()].waits_since = waits_since

    def end_connections(self) -> None:
        """End all, and wait for their threads."""
        with self._lock:
            left = list(self._connections.values())
            for each in left:
                _end(each.socket)
        for each in left:
            each.thread.join()


def _end(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other side was first


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
