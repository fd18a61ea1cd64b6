"""Requests to the servers of shm and tcp by a reader with a token who asks for anything, and by strangers without one.

Beside it an honest reader's bytes are right, what was handed out is unchanged, and every server still answers.
"""

from __future__ import annotations

import random
import socket
import struct

import numpy as np

from hunts.frame import Broken, Stop, Tally
from p2pkv.testing.transport_fixtures import ENOUGH, Reader
from p2pkv.testing.transport_peer import page_spans
from p2pkv.transports.base import Status
from p2pkv.transports.native import ShmTransport, TcpTransport
from strangers import HELLO, SPAN, Owner

N_VISITS = 40
EDGES = [0, 1, 7, 8, 4095, 4096, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 4096, 2**64 - 8, 2**64 - 1]


def attack(rng: random.Random, tally: Tally, stop: Stop) -> None:
    """Visit an owner many times, with a token and without."""
    kind = rng.choice([ShmTransport, TcpTransport])
    with kind() as transport:
        owner = Owner(transport)
        before = np.array(owner.memory.bytes)
        kept: list[socket.socket] = []
        try:
            for visit in range(N_VISITS):
                if stop():
                    break
                kept += _visit(owner, rng)
                tally["visits of readers"] += 1
                if visit % 8 == 0:
                    _honest_read_is_right(owner, tally)
            _honest_read_is_right(owner, tally)
        finally:
            for connection in kept:
                connection.close()
        if not np.array_equal(owner.memory.bytes, before):
            raise Broken(f"memory that was handed out over {transport.name} has changed")
        owner.memory.region.close()


def _honest_read_is_right(owner: Owner, tally: Tally) -> None:
    with type(owner.transport)() as transport:
        reader = Reader(transport)
        endpoint, remote = reader.connect(owner.transport.accept, owner.memory.region.describe())
        statuses = endpoint.read(reader.local, remote, page_spans([0, 1]), words=None).wait(ENOUGH)
        if not (statuses == Status.OK).all():
            raise Broken(f"an honest reader beside got {statuses} over {transport.name}")
        got = reader.bytes[: 2 * _page(owner)]
        expected = owner.memory.bytes[_first(owner) :][: 2 * _page(owner)]
        if not np.array_equal(got, expected):
            raise Broken(f"an honest reader beside got wrong bytes over {transport.name}")
        endpoint.close()
        reader.local.close()
    tally["honest reads"] += 1


def _page(owner: Owner) -> int:
    return int(page_spans([0])[0][2])


def _first(owner: Owner) -> int:
    return int(page_spans([0])[0][1])


def _visit(owner: Owner, rng: random.Random) -> list[socket.socket]:
    """Say something; return the connection if it is kept open."""
    has_token = rng.random() < 0.8
    connection = owner.enter() if has_token else owner.connect()
    connection.settimeout(5)
    try:
        if not has_token:
            connection.sendall(_hello(owner, rng))
        for _ in range(rng.randint(0, 4)):
            request = _tcp_request(owner, rng) if owner.transport.name == "tcp" else _shm_request(owner, rng)
            connection.sendall(_damaged(request, rng))
        connection.setblocking(False)
        if rng.random() < 0.5:
            connection.recv(1 << 16)
    except OSError:
        pass  # hung up on, or no answer yet: either is right
    if rng.random() < 0.2:
        return [connection]
    if rng.random() < 0.3:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    connection.close()
    return []


def _hello(owner: Owner, rng: random.Random) -> bytes:
    magic = rng.choice([HELLO[owner.transport.name], b"P2DH", rng.randbytes(4)])
    return struct.pack("<4sHH", magic, rng.choice([0, 1, 2, 65535]), rng.choice([0, 65535])) + rng.randbytes(
        32
    )


def _tcp_request(owner: Owner, rng: random.Random) -> bytes:
    spans = [_span(owner, rng) for _ in range(rng.choice([0, 1, 2, 17]))]
    n = rng.choice([None, None, None, 0, 1, len(spans) + 1, 8192, 8193, 2**32 - 1])
    return owner.request(*spans, version=rng.choice([1, 1, 1, 0, 2]), n=n)


def _span(owner: Owner, rng: random.Random) -> tuple[int, int, int, int, int]:
    """Return one that is right but for some of its fields."""
    offset, length = int(rng.randrange(0, 4) * 4096), rng.choice([8, 4096])
    span = [owner.region_id, rng.choice([0, 1]), rng.randrange(0, 4) * 8, offset, length]
    while rng.random() < 0.4:
        field = rng.randrange(len(span))
        span[field] = rng.choice(EDGES) % (2**32 if field < 2 else 2**64)
    return span[0], span[1], span[2], span[3], span[4]


def _shm_request(owner: Owner, rng: random.Random) -> bytes:
    region = rng.choice([owner.region_id, 0, rng.getrandbits(32)])
    return struct.pack("<4sHHII", b"P2SQ", rng.choice([1, 1, 1, 0, 2]), 0, region, rng.choice([0, 1]))


def _damaged(request: bytes, rng: random.Random) -> bytes:
    """Return it as it is, cut, drawn out, or with bits of it turned."""
    how = rng.random()
    if how < 0.1:
        return request[: rng.randrange(1, len(request))]
    if how < 0.2:
        return request + rng.randbytes(rng.randrange(1, SPAN.size))
    if how < 0.35:
        at = rng.randrange(len(request))
        return request[:at] + bytes([request[at] ^ 1 << rng.randrange(8)]) + request[at + 1 :]
    return request
