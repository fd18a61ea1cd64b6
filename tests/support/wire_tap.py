"""Somebody on the wire between a tcp reader and its owner: he keeps what goes by, and changes what he is told to."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from p2pkv.transports.native import NativeEndpoint, TcpTransport

if TYPE_CHECKING:
    from typing_extensions import Self

_HELLO_BYTES = 40
_TAG_BYTES = 16
_MOST_BYTES = 64 << 10
"""What a record holds at most."""
_PORT = slice(6, 8)
"""Where an owner's half of the handshake has its port."""

Deed = Literal["flip", "drop", "repeat", "swap", "cut"]
DEEDS: tuple[Deed, ...] = ("flip", "drop", "repeat", "swap", "cut")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done to one record of each connection, counted from when the plan was made."""

    deed: Deed
    of_owner: bool
    number: int
    dice: random.Random


class WireTap:
    """Passes connections to one owner on; ``plan`` may be changed at any time. Counts and bytes are of all so far."""

    def __init__(self, *, is_plain: bool = False) -> None:
        self.is_plain = is_plain
        """What goes by is no records, and is passed on as it is."""
        self.seen = bytearray()
        self.n_deeds = 0
        self.plan: Plan | None = None
        self._target = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()  # guards all above
        self._threads = [threading.Thread(target=self._let_in, name="tap")]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        with self._lock:
            for end in self._sockets:
                _end(end)
        for thread in self._threads[1:]:
            thread.join()
        for end in self._sockets:
            end.close()

    def through(self, half: bytes) -> bytes:
        """Return an owner's half of a handshake that leads here, from where it leads to the owner."""
        (self._target,) = struct.unpack("<H", half[_PORT])
        port = struct.pack("<H", self._listener.getsockname()[1])
        return half[: _PORT.start] + port + half[_PORT.stop :]

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):  # the end of the test
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                with self._lock:
                    self._sockets += [near, far]
                for ends, of_owner in (((near, far), False), ((far, near), True)):
                    thread = threading.Thread(target=self._pass_on, args=(*ends, of_owner), name="tap")
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, of_owner: bool) -> None:
        with contextlib.suppress(OSError):  # one of the two has hung up
            if not of_owner:
                sink.sendall(self._take(source, _HELLO_BYTES))
            while self.is_plain:
                sink.sendall(self._take(source, 1, _MOST_BYTES))
            plan, number, held = None, 0, b""
            while True:
                record = self._record(source)
                if self.plan is not plan:
                    plan, number, held = self.plan, 0, b""
                if plan is not None and plan.of_owner == of_owner and number == plan.number:
                    self.n_deeds += 1
                    if plan.deed == "swap":
                        held = record
                    elif not self._do(plan, record, sink):
                        break
                else:
                    sink.sendall(record + held)
                    held = b""
                number += 1
        _end(source)
        _end(sink)

    @staticmethod
    def _do(plan: Plan, record: bytes, sink: socket.socket) -> bool:
        """Send what the plan makes of the record; False: the connection is to be cut."""
        if plan.deed == "cut":
            sink.sendall(record[: len(record) // 2])
            return False
        if plan.deed == "flip":
            spoiled = bytearray(record)
            # A length that became larger would be waited for, which is what "drop" does.
            spoiled[plan.dice.randrange(4, len(spoiled))] ^= 1 << plan.dice.randrange(8)
            sink.sendall(spoiled)
        elif plan.deed == "repeat":
            sink.sendall(record + record)
        return True

    def _record(self, source: socket.socket) -> bytes:
        length = self._take(source, 4)
        (n,) = struct.unpack("<I", length)
        assert 1 <= n <= _MOST_BYTES, f"not a record: {length.hex()}"
        return length + self._take(source, n + _TAG_BYTES)

    def _take(self, source: socket.socket, n: int, most: int = 0) -> bytes:
        """Take ``n`` bytes, and up to ``most`` if there are more."""
        taken = bytearray()
        while len(taken) < n:
            some = source.recv(max(n, most) - len(taken))
            if not some:
                raise ConnectionError("hung up")
            taken += some
        with self._lock:
            self.seen += taken
        return bytes(taken)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


def tapped(tap: WireTap) -> type[TcpTransport]:
    """Return the tcp transport of nodes whose reads all lead through a tap, for ``p2pkv.transports.BUILT_IN``."""

    class TappedTcp(TcpTransport):
        def open(self) -> NativeEndpoint:
            return _TappedEndpoint(super().open(), tap)

    return TappedTcp


class _TappedEndpoint(NativeEndpoint):
    def __init__(self, inner: NativeEndpoint, tap: WireTap) -> None:
        super().__init__(inner.native)
        self._tap = tap

    def bind(self, remote: bytes) -> None:
        super().bind(self._tap.through(remote))
