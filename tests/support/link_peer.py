"""The other end of a transfer link, written from docs/wire.md alone: a door, and a connection that comes to it."""

from __future__ import annotations

import ctypes
import socket
import struct

import zmq

SECONDS = 120.0
TAG = 16

_sodium = ctypes.CDLL(zmq.backend.cython._zmq.__file__)  # pyzmq brings libsodium along


def _sealed(operation: str, key: bytes, side: int, number: int, message: bytes, out_nbytes: int) -> bytes:
    out, size = ctypes.create_string_buffer(max(1, out_nbytes)), ctypes.c_ulonglong()
    call = getattr(_sodium, f"crypto_aead_chacha20poly1305_ietf_{operation}")
    given = (message, ctypes.c_ulonglong(len(message)))
    nothing = (None, ctypes.c_ulonglong(0))
    nonce = struct.pack("<IQ", side, number)
    if operation == "encrypt":
        failed = call(out, ctypes.byref(size), *given, *nothing, None, nonce, key)
    else:
        failed = call(out, ctypes.byref(size), None, *given, *nothing, nonce, key)
    assert not failed, "what came was not sealed with this key, in this direction, as this frame"
    return out.raw[: size.value]


class LinkPeer:
    """Takes one connection at ``door``, as the owner of it."""

    def __init__(self, token: bytes, key: bytes) -> None:
        self._key = key
        self._n_sent = self._n_received = 0
        self._taken = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(SECONDS)
        self._connection: socket.socket | None = None
        self.port: int = self._listener.getsockname()[1]
        address = socket.inet_aton("127.0.0.1") + bytes(12)
        self.door = struct.pack("<4sHHB3xI16s", b"P2TD", 1, self.port, 4, 0, address) + token + key

    def accept(self) -> bytes:
        """Wait for the connection; return its hello."""
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(SECONDS)
        return self._take(8 + 32)

    def receive(self) -> bytes:
        """Return the next message."""
        self._gather(4)
        (n,) = struct.unpack_from("<I", self._taken)
        self._gather(4 + n)
        sealed = self._take(4 + n)[4:]
        message = _sealed("decrypt", self._key, 0, self._n_received, sealed, len(sealed) - TAG)
        self._n_received += 1
        return message

    def receive_within(self, seconds: float) -> bytes | None:
        """Return the next message, None if it is not all here by then; the next call goes on with it."""
        assert self._connection is not None
        self._connection.settimeout(seconds)
        try:
            return self.receive()
        except TimeoutError:
            return None
        finally:
            self._connection.settimeout(SECONDS)

    def send(self, message: bytes) -> None:
        sealed = _sealed("encrypt", self._key, 1, self._n_sent, message, len(message) + TAG)
        self._n_sent += 1
        assert self._connection is not None
        self._connection.sendall(struct.pack("<I", len(sealed)) + sealed)

    def _take(self, n: int) -> bytes:
        self._gather(n)
        taken, self._taken = self._taken[:n], self._taken[n:]
        return taken

    def _gather(self, n: int) -> None:
        """Have the next ``n`` bytes here; what came of them stays if it takes too long."""
        assert self._connection is not None
        while len(self._taken) < n:
            part = self._connection.recv(n - len(self._taken))
            assert part, "the node hung up"
            self._taken += part

    def close(self) -> None:
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
