"""A connection that nobody can drag out: all that is sent and received on it is over at one moment.

A socket's own timeout holds for each ``recv``, so that a server which sends a byte now and then is waited for without
end. Here each of them gets what is left until the deadline. It has what :class:`http.client.HTTPConnection` asks of a
socket, and no more.
"""

from __future__ import annotations

import io
import socket
import ssl
import time
from typing import TYPE_CHECKING

from p2pkv.address import split_address
from p2pkv.control.host_names import Names

if TYPE_CHECKING:
    from typing_extensions import Buffer

_KEEP_ALIVE_S = 10
"""A connection whose other host is gone without a word is known to be dead after some of these."""


class TimedSocket:
    """One connection, used by one thread; :meth:`interrupt` is for any."""

    def __init__(self) -> None:
        self.until = 0.0
        """By :func:`time.monotonic`: what waits at this moment raises TimeoutError."""
        self._rest_within: float | None = None
        self._reader: io.BufferedReader | None = None
        self._may_receive = True
        self._socket: socket.socket | None = None
        self._is_interrupted = False

    def connect(self, names: Names, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Look the host up, and connect to the first of its numbers that answers. Raises OSError.

        A host that was found before is looked up again, but not waited for: a name server that hangs would cut all
        nodes off from a store that answers.
        """
        failure: OSError = socket.gaierror(socket.EAI_NONAME, "nobody knows its name; mend the name, or DNS")
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        numbers = names.numbers(address)
        if not numbers:
            names.wait_for([address], self._left())
            numbers = names.numbers(address)
        for i, number in enumerate(numbers):
            try:
                self._connect(number, self._left() / (len(numbers) - i))
                break
            except OSError as error:
                failure = error
                self.close()
        else:
            raise failure
        assert self._socket is not None
        if tls is not None:
            secured = tls.wrap_socket(self._socket, server_hostname=host, do_handshake_on_connect=False)
            self._take(secured)
            secured.settimeout(self._left())
            secured.do_handshake()

    def wait_for_line(self, timeout: float, rest_within: float) -> None:
        """Let the next line begin within ``timeout`` seconds, and be whole within ``rest_within`` from then on.

        One that came in part with the line before has begun already.
        """
        self.until, self._rest_within = time.monotonic() + timeout, rest_within
        if self._has_more():
            self._begin_line()

    @property
    def is_silent(self) -> bool:
        """Whether nothing of the line has come that :meth:`wait_for_line` is about."""
        return self._rest_within is not None

    def sendall(self, data: bytes) -> None:
        """Send everything before the deadline."""
        assert self._socket is not None
        rest = memoryview(data)
        while rest:
            self._socket.settimeout(self._left())
            rest = rest[self._socket.send(rest) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return what an answer is read from."""
        assert self._socket is not None
        assert mode == "rb", "answers are read, as bytes"
        self._reader = io.BufferedReader(_Incoming(self, self._socket))
        return self._reader

    def receive(self, raw: io.RawIOBase, connection: socket.socket, into: Buffer) -> int | None:
        """Read what comes before the deadline; None is as much as a socket has that does not block."""
        if not self._may_receive:
            return None
        connection.settimeout(self._left())
        n: int | None = raw.readinto(into)
        if n:
            self._begin_line()
        return n

    def close(self) -> None:
        """Close the connection, once nothing is read from it any more. Idempotent."""
        if self._socket is not None:
            self._socket.close()

    def interrupt(self) -> None:
        """End what is under way, and all that comes later. From any thread."""
        self._is_interrupted = True
        if self._socket is not None:
            _shut_down(self._socket)

    def _has_more(self) -> bool:
        """Whether bytes of the next line have come already; those that end the chunk before are none."""
        if self._reader is None or self._reader.closed:
            return False
        self._may_receive = False
        try:
            return bool(self._reader.peek(1).strip(b"\r\n"))
        finally:
            self._may_receive = True

    def _begin_line(self) -> None:
        if self._rest_within is not None:
            self.until = min(self.until, time.monotonic() + self._rest_within)
            self._rest_within = None

    def _left(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _connect(self, number: str, timeout: float) -> None:
        host, port = split_address("address", number)
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._take(connection)
        connection.settimeout(timeout)
        connection.connect((host, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _KEEP_ALIVE_S)
        if self._is_interrupted:  # while it connected, when there was nothing to shut down
            raise ConnectionError("this node is closing")

    def _take(self, connection: socket.socket) -> None:
        self._socket = connection
        if self._is_interrupted:
            _shut_down(connection)


class _Incoming(io.RawIOBase):
    """What comes on a connection, which stays open until this is closed as well."""

    def __init__(self, timed: TimedSocket, connection: socket.socket) -> None:
        self._timed = timed
        self._connection = connection
        self._raw = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Buffer, /) -> int | None:
        return self._timed.receive(self._raw, self._connection, into)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _shut_down(connection: socket.socket) -> None:
    try:
        # not SSLSocket's own, which makes the thread that reads take what is encrypted for what is not
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return  # it is closed already, or not connected yet
