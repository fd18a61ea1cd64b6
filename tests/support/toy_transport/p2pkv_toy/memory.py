"""Registered memory: what is read from, and what is read into."""

from __future__ import annotations

import ctypes
import secrets
import socket
import threading
from collections.abc import Callable

from p2pkv.errors import TransportError
from p2pkv.transports.base import NO_WORD, MemoryRegion, RemoteRegion
from p2pkv_toy.wire import pack_region


class ToyMemoryRegion(MemoryRegion):
    """``_lock`` is held while a byte of it is touched, and never while anybody is waited for.

    So ``close`` returns after the last touch, and does not wait for a peer.
    """

    def __init__(
        self,
        buffer: object,
        address: int,
        nbytes: int,
        *,
        readable: bool,
        forget: Callable[[ToyMemoryRegion], None],
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.id = secrets.randbits(63)
        self.is_readable = readable
        self.is_closed = False
        self._forget = forget
        self._lock = threading.Lock()
        self._buffer: object = buffer
        self._bytes = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")

    def describe(self) -> bytes:
        if not self.is_readable:
            raise TransportError("memory that was not registered readable has nothing to describe")
        return pack_region(self.id, self.nbytes)

    def holds(self, offset: int, length: int, word: int) -> bool:
        """Return whether a span and its word lie within, as an honest reader's always do."""
        has_word = word == NO_WORD or (word % 8 == 0 and word + 8 <= self.nbytes)
        return offset + length <= self.nbytes and has_word

    def copy(self, offset: int, nbytes: int) -> bytes | None:
        """Return a copy of some bytes, or None if it is closed."""
        with self._lock:
            return None if self.is_closed else bytes(self._bytes[offset : offset + nbytes])

    def load(self, word: int) -> int | None:
        """Return a word, or None if it is closed; without a word, 0.

        To take the lock anew is the fence: the load can't move before copies that were made before.
        """
        with self._lock:
            if self.is_closed:
                return None
            return 0 if word == NO_WORD else ctypes.c_uint64.from_address(self.address + word).value

    def receive(self, connection: socket.socket, offset: int, nbytes: int) -> int | None:
        """Let a socket that never blocks write here; return how many bytes it wrote, or None if it is closed."""
        with self._lock:
            if self.is_closed:
                return None
            return connection.recv_into(self._bytes[offset : offset + nbytes])

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._buffer = None
        self._forget(self)


class ToyRemoteRegion(RemoteRegion):
    def __init__(self, region_id: int, nbytes: int, endpoint: object) -> None:
        self.id = region_id
        self.nbytes = nbytes
        self.endpoint = endpoint
