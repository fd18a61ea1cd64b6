"""Servers that answer a byte now and then: each ``recv`` is in time, and the answer never ends."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

BEGINNINGS = {
    "nothing": b"",
    "headers": b"HTTP/1.1 200 OK\r\nX-Slow: ",
    "body": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "interim answers": b"",
    "TLS": b"\x16\x03\x03\x40\x00",
}
"""What comes at once, by what it is that drips then."""
DROPS = {"nothing": b"", "chunks": b"1\r\n{\r\n", "interim answers": b"HTTP/1.1 100 Continue\r\n\r\n"}
PAUSE_S = 0.05
_LONGEST_S = 12.0
"""Then the connection is closed, so that whoever waits without end fails instead of hanging."""


class DrippingServer:
    """Drips from the first request of each connection on, until it is closed."""

    def __init__(self, what: str) -> None:
        self._beginning, self._drop = BEGINNINGS[what], DROPS.get(what, b" ")
        self._server = socket.create_server(("127.0.0.1", 0))
        self._closing = threading.Event()
        self.asked = threading.Event()
        """Set once somebody has asked something."""
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                thread = threading.Thread(target=self._drip, args=(connection,), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _drip(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            self.asked.set()
            connection.sendall(self._beginning)
            until = time.monotonic() + _LONGEST_S
            while time.monotonic() < until and not self._closing.wait(PAUSE_S):
                connection.sendall(self._drop)
