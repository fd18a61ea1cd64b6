"""What travels between two ends. Numbers are little-endian; each blob begins with a magic number and a version.

A reader connects, sends the hello and then requests, one at a time: a header and a row for each span. The owner answers
with the bytes of each span and then, behind them, its trailer.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass

import numpy as np

from p2pkv.errors import TransportError

VERSION = 1
TOKEN_NBYTES = 32
MAX_SPANS = 8192
"""Spans of one request; an owner allocates for no more."""

_HALF = struct.Struct("<4sHH4sI32s")
_REGION = struct.Struct("<4sHHQQ")
HELLO = struct.Struct("<4sHH32s")
REQUEST = struct.Struct("<4sI")
TRAILER = struct.Struct("<QQ")
"""1 if the region was there to the end, else 0; the word, or 0 if none was asked for."""

ROW = np.dtype("<u8")
"""Of a request's four columns: region, offset, length, offset of the word (NO_WORD: none)."""


@dataclass(frozen=True, slots=True)
class Half:
    """One end's half of a handshake: where it lets readers in, and the token that it lets one in by."""

    host: str
    port: int
    token: bytes

    def pack(self) -> bytes:
        host = ipaddress.IPv4Address(self.host).packed
        return _HALF.pack(b"TOYE", VERSION, 0, host, self.port, self.token)

    @classmethod
    def unpack(cls, blob: bytes) -> Half:
        _check(blob, _HALF, b"TOYE")
        *_, host, port, token = _HALF.unpack(blob)
        if not 0 < port <= 65535:
            raise TransportError(f"a handshake of toy has port {port}")
        return cls(str(ipaddress.IPv4Address(host)), port, token)


def pack_region(region_id: int, nbytes: int) -> bytes:
    return _REGION.pack(b"TOYR", VERSION, 0, region_id, nbytes)


def unpack_region(blob: bytes) -> tuple[int, int]:
    """Return a region's id and size."""
    _check(blob, _REGION, b"TOYR")
    *_, region_id, nbytes = _REGION.unpack(blob)
    return region_id, nbytes


def pack_hello(token: bytes) -> bytes:
    return HELLO.pack(b"TOYH", VERSION, 0, token)


def unpack_hello(blob: bytes) -> bytes:
    """Return the token."""
    _check(blob, HELLO, b"TOYH")
    token: bytes = HELLO.unpack(blob)[3]
    return token


def pack_request_header(n_spans: int) -> bytes:
    return REQUEST.pack(b"TOYQ", n_spans)


def unpack_request_header(blob: bytes) -> int:
    """Return how many rows follow."""
    magic, n_spans = REQUEST.unpack(blob)
    if magic != b"TOYQ" or not 0 < n_spans <= MAX_SPANS:
        raise TransportError(f"a request of toy begins with {magic!r} and {n_spans} spans")
    return int(n_spans)


def receive(connection: socket.socket, nbytes: int) -> bytes:
    """Return exactly so many bytes; blocks as the socket's time-out says."""
    blob = bytearray(nbytes)
    view = memoryview(blob)
    while view:
        n = connection.recv_into(view)
        if n == 0:
            raise ConnectionError("the other end hung up")
        view = view[n:]
    return bytes(blob)


def _check(blob: bytes, layout: struct.Struct, magic: bytes) -> None:
    if len(blob) != layout.size or blob[:4] != magic:
        raise TransportError(
            f"{len(blob)} bytes of {blob[:4]!r} are no {magic.decode()} of the toy transport"
        )
    version = int.from_bytes(blob[4:6], "little")
    if version != VERSION:
        raise TransportError(f"the other end has version {version} of the toy transport, this one {VERSION}")
