"""A TCP server with a thread for each connection, and no more connections than it has room for.

When there is no room for one more, that goes which has had nothing answered for longest: who connects and says nothing,
or slowly, keeps nobody out. Who is at the door while no descriptor is left does not keep the server awake.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from dataclasses import dataclass
from socketserver import TCPServer
from typing import Any

from p2pkv.descriptors import LACKING, NOBODY_IN_S
from p2pkv.limited_log import LimitedLog

MAX_CONNECTIONS = 64
SILENT_S = 30.0
"""How long a connection may say nothing, and a body or an answer may stand still: the ``timeout`` of handlers."""


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    thread: threading.Thread
    waits_since: float | None
    """Since when nothing of it was answered; None while an answer is made."""


class BoundedServer(TCPServer):
    """Goes before another kind of TCPServer, or alone, with attributes of the subclass that say who it is."""

    allow_reuse_address = True
    request_queue_size = 128
    connection_name: str
    """What connections' threads are called."""
    what: str
    """What log lines call it."""
    log: LimitedLog
    _lock: threading.Lock  # guards the next one
    _connections: dict[int, _Connection]  # by descriptor

    def server_bind(self) -> None:
        """Bind, with room for connections."""
        self._lock = threading.Lock()
        self._connections = {}
        super().server_bind()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept; where that can't be done for now, wait for a moment before it is tried again."""
        try:
            request: tuple[socket.socket, Any] = super().get_request()
        except OSError as error:
            if error.errno in LACKING:
                self.log.warning("accept", "the %s lets nobody in for now: %s", self.what, error)
                time.sleep(NOBODY_IN_S)
            raise
        return request

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve it in a thread of its own, or close it."""
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name=self.connection_name, daemon=True
        )
        with self._lock:
            if len(self._connections) >= MAX_CONNECTIONS and not self._make_room():
                request.close()
                return
            thread.start()  # first, since it may fail; what the thread does with its connection waits for the lock
            self._connections[request.fileno()] = _Connection(request, thread, time.monotonic())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say why a connection was not taken, which the base has closed."""
        self.log.warning(
            "connection", "the %s did not take a connection", self.what, exc_info=sys.exc_info()[1]
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
