"""Messages to a node's control socket by a member who says anything: any kind, count, boot and body.

Beside it two honest nodes keep finding each other's pages, and answer the member when he says something sensible.
What a member can do by right (docs/security.md) is left out: he tells of no members that there are not, takes back
nothing of the honest nodes', and has none of them drain.
"""

from __future__ import annotations

import random
import struct
import tempfile
import time
from pathlib import Path

import zmq

from hunts.frame import Broken, Stop, Tally
from p2pkv.control.secret import cluster_keys
from p2pkv.control.sockets import ControlClient, Request, Socket
from p2pkv.control.wire import Kind, pack_request
from p2pkv.errors import P2PKVError
from pair import Pair

N_MESSAGES = 150
RECORDS = {Kind.GET: 16, Kind.PUT: 88, Kind.DROP: 48, Kind.PROMOTE: 32}
HEADED = {
    Kind.FOLLOW: (8, 24),
    Kind.TAKE_BACK: (40, 16),
    Kind.HAND_OVER: (16, 16),
    Kind.TAKE_OVER: (40, 80),
}
"""Bytes that come first, and of each record after them."""
TRANSPORTS = ["shm", "tcp", "directory", "links", "verbs", "none", "x" * 65, ""]
COUNTS = [0, 1, 2, 3, 8192, 8193, 2**31, 2**32 - 1]


def attack(rng: random.Random, tally: Tally, stop: Stop) -> None:
    """Send one of two honest nodes many messages."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder), transports=["shm", "tcp"])
        context: zmq.Context[Socket] = zmq.Context()
        client = ControlClient(context, cluster_keys(pair.owner.config.secret_file))
        try:
            keys = pair.publish()
            for number in range(N_MESSAGES):
                if stop():
                    break
                _say(client, pair.owner.address, rng)
                tally["messages of members"] += 1
                if number % 30 == 0:
                    _honest_are_right(pair, keys)
            _honest_are_right(pair, keys)
            if not _answers_probes(context, pair):
                raise Broken("the control socket answers no probe any more")
            tally["honest fetches"] += 1
        finally:
            client.close()
            context.destroy(0)  # also of what a failure has left open
            pair.close()


def _honest_are_right(pair: Pair, keys: list[str]) -> None:
    began = time.monotonic()
    while not pair.fetch_is_right(keys):
        if time.monotonic() - began > 20:
            raise Broken("honest nodes miss each other's pages for 20 s")
    fresh = pair.publish()
    while not pair.fetch_is_right(fresh):
        if time.monotonic() - began > 40:
            raise Broken("honest nodes miss what was published beside it for 20 s")


def _answers_probes(context: zmq.Context[Socket], pair: Pair) -> bool:
    """Ask over a connection of its own: on the member's there may be answers to what it said."""
    client = ControlClient(context, cluster_keys(pair.owner.config.secret_file))
    try:
        return client.ask(Request(pair.owner.address, Kind.PROBE), 20.0) is not None
    finally:
        client.close()


def _say(client: ControlClient, address: str, rng: random.Random) -> None:
    kind = rng.choice([*(kind for kind in Kind if kind is not Kind.DRAIN), 0, 11, 0x8001, 0xFFFF])
    body, count = _body(kind, rng)
    if rng.random() < 0.2:
        body = body[: rng.randrange(len(body) + 1)] + rng.randbytes(rng.choice([0, 1, 33]))
    message = pack_request(
        Kind.PROBE, rng.getrandbits(64), boot=rng.choice([0, 0, 0, 1]), count=count, body=body
    )
    # magic (4), version (2), kind (2): `pack_request` builds no kind but ours
    message = message[:6] + struct.pack("<H", kind) + message[8:]
    if rng.random() < 0.1:
        at = rng.randrange(8)
        message = message[:at] + bytes([message[at] ^ 1 << rng.randrange(8)]) + message[at + 1 :]
    frames = [message] if rng.random() < 0.9 else [message, b"", message]
    lines = client.borrow(address)
    if not lines:
        return
    (line,) = lines  # the member knows one secret
    socket = line.socket
    try:
        socket.send_multipart(frames, zmq.DONTWAIT)
        if rng.random() < 0.3:
            socket.poll(50)
    except (zmq.ZMQError, P2PKVError):
        pass  # his queue is full
    if rng.random() < 0.5:
        client.give_back(address, line)
    else:
        socket.close()


def _body(kind: int, rng: random.Random) -> tuple[bytes, int]:
    """Return what a request of this kind has, with numbers that nobody would send, and a count."""
    if kind in RECORDS:
        n = rng.choice([0, 1, 5, 300])
        size = RECORDS[Kind(kind)]
        return _record(size, rng) * n, n if rng.random() < 0.8 else rng.choice(COUNTS)
    if kind == Kind.CONNECT:
        name = rng.choice(TRANSPORTS).encode()
        n = len(name) if rng.random() < 0.8 else rng.choice(COUNTS)
        return struct.pack("<I", n) + name + rng.randbytes(rng.choice([0, 8, 32, 80, 4096])), 1
    if kind in HEADED:
        head, size = HEADED[Kind(kind)]
        n = rng.choice([0, 1, 5, 300])
        body = _record(16 + head, rng)[16:] + b"".join(_record(size, rng) for _ in range(n))
        return body, n if rng.random() < 0.8 else rng.choice(COUNTS)
    return rng.randbytes(rng.choice([0, 1, 8, 32, 5000])), rng.choice(COUNTS)


def _record(size: int, rng: random.Random) -> bytes:
    """Return one whose fields are zeros, ones, or anything."""
    words = [rng.choice([0, 1, 2**63, 2**64 - 1, rng.getrandbits(64)]) for _ in range(size // 8)]
    return rng.randbytes(16) + struct.pack(f"<{len(words) - 2}Q", *words[2:])
