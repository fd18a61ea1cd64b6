"""Whoever speaks the protocol of shm or tcp to an owner, with a token or without.

The frames are spelled out here from docs/transports.md and not imported, so that a change of format shows.
"""

from __future__ import annotations

import socket
import struct

from p2pkv.testing.transport_fixtures import ENOUGH, Reader, settled
from p2pkv.testing.transport_peer import PagedMemory, page_spans
from p2pkv.transports.base import Transport

HELLO = {"shm": b"P2SH", "tcp": b"P2TH"}
REQUEST = struct.Struct("<4sHHQII")
SPAN = struct.Struct("<IIQQQ")
CHUNK = struct.Struct("<4sIQIIQ")
TRAILER = struct.Struct("<II")


class Owner:
    """An owner, and strangers who got hold of a token of it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.memory = PagedMemory(transport)
        self.region_id: int = struct.unpack_from("<I", self.memory.region.describe(), 8)[0]

    def token(self) -> bytes:
        with self.transport.open() as donor:
            half = self.transport.accept(donor.describe())
        return half[32:64] if self.transport.name == "tcp" else half[48:80]

    def connect(self) -> socket.socket:
        with self.transport.open() as donor:
            half = donor.describe()
        if self.transport.name == "tcp":
            (port,) = struct.unpack_from("<H", half, 6)
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.settimeout(5)
        stranger.connect(b"\0" + half[8:48].rstrip(b"\0"))
        return stranger

    def hello(self, token: bytes, version: int = 1, magic: bytes = b"") -> bytes:
        return struct.pack("<4sHH", magic or HELLO[self.transport.name], version, 0) + token

    def enter(self) -> socket.socket:
        stranger = self.connect()
        stranger.sendall(self.hello(self.token()))
        return stranger

    def request(
        self, *spans: tuple[int, int, int, int, int], version: int = 1, n: int | None = None
    ) -> bytes:
        header = REQUEST.pack(b"P2TQ", version, 0, 7, len(spans) if n is None else n, 0)
        return header + b"".join(SPAN.pack(*span) for span in spans)

    def serves_well(self) -> bool:
        with type(self.transport)() as transport:
            reader = Reader(transport)
            endpoint, remote = reader.connect(self.transport.accept, self.memory.region.describe())
            statuses = endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)
        return settled(statuses) == ["OK"]
