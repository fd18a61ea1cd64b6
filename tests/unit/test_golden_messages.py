"""The control plane's messages, byte for byte: what every released version sent, this one still sends and answers.

``tests/golden/control-v1.txt`` holds them in hex, one a line, with what they are. A message that changes breaks older
nodes: raise the protocol's version and add a file, don't edit this one. A new kind of message is added at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from p2pkv import _native
from p2pkv.control.counters import decode_counters, encode_counters
from p2pkv.control.secret import ClusterKeys
from p2pkv.control.sockets import ControlServer, Socket
from p2pkv.control.wire import (
    DROP_ENTRY,
    PUT_ENTRY,
    Kind,
    ReplyStatus,
    pack_connect,
    pack_connected,
    pack_request,
    unpack_connect,
    unpack_connected,
    unpack_reply,
)
from p2pkv.page import LOCATION, Namespace

GOLDEN = Path(__file__).parents[1] / "golden" / "control-v1.txt"
NODE, BOOT = 0x1122334455667788, 0x17
OWNER, OWNER_BOOT, DIGEST = 0xA1, 0xB2, 0xC3
COUNTERS = {"p2pkv_members": 3.0, 'p2pkv_fetched_pages_total{source="shm"}': 17.0}
VIEW = b"the view, whose own format is in view-v1.bin"


def _location() -> np.ndarray:
    location = np.zeros(1, LOCATION)
    location[0] = (OWNER, OWNER_BOOT, 4096, 1000, 64, 2, 0xDEADBEEF, 0, 1)
    return location


def requests() -> dict[str, bytes]:
    """Build each request as a node does."""
    keys = Namespace("golden").hash(["found", "missing"])
    put = np.zeros(1, PUT_ENTRY)
    put["key"], put["sequence"], put["location"] = keys[:1], 7, _location()
    drop = np.zeros(1, DROP_ENTRY)
    drop["key"], drop["sequence"], drop["owner"], drop["boot"] = keys[1:], 8, OWNER, OWNER_BOOT
    drop["generation"] = 2
    bodies = {
        "PROBE": (Kind.PROBE, 1, b"", 0),
        "PUT": (Kind.PUT, 1, put.tobytes(), BOOT),
        "GET": (Kind.GET, 2, keys.tobytes(), BOOT),
        "DROP": (Kind.DROP, 1, drop.tobytes(), BOOT),
        "CONNECT": (Kind.CONNECT, 1, pack_connect("golden", b"half"), BOOT),
        "CONNECT unserved": (Kind.CONNECT, 1, pack_connect("other", b"half"), BOOT),
        "EXCHANGE": (Kind.EXCHANGE, 1, VIEW, 0),
        "PROBE wrong boot": (Kind.PROBE, 1, b"", BOOT - 1),
        "GET malformed": (Kind.GET, 3, b"short", BOOT),
        "COUNTERS": (Kind.COUNTERS, 1, b"", BOOT),
    }
    return {
        name: pack_request(kind, number, boot=boot, count=count, body=body)
        for number, (name, (kind, count, body, boot)) in enumerate(bodies.items(), start=1)
    }


class Plane:
    """A native loop that is in the golden node's state, and a connection to it."""

    def __init__(self) -> None:
        public, private = zmq.curve_keypair()
        self._context: zmq.Context[Socket] = zmq.Context()
        shard = _native.Shard(1024)
        shard.set_view([OWNER], [OWNER_BOOT])
        keys = ClusterKeys(public=public, private=private)
        self._server = ControlServer(self._context, keys, "127.0.0.1:0", shard)
        self._server.loop.announce(NODE, BOOT)
        self._server.loop.set_view(VIEW, DIGEST)
        self._server.loop.serve("golden", None, b"")
        self._server.start()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.curve_serverkey = self._socket.curve_publickey = public
        self._socket.curve_secretkey = private
        self._socket.connect(f"tcp://{self._server.address}")

    def answer(self, name: str, request: bytes) -> bytes:
        self._socket.send(request)
        if name == "CONNECT":
            event = self._server.loop.take(Kind.CONNECT, 10.0)
            assert event is not None
            assert unpack_connect(event[1]) == ("golden", b"half")
            self._server.loop.reply(event[0], ReplyStatus.OK, pack_connected(b"other half", b"region"))
        if name == "COUNTERS":
            event = self._server.loop.take(Kind.COUNTERS, 10.0)
            assert event is not None
            self._server.loop.reply(event[0], ReplyStatus.OK, encode_counters(COUNTERS))
        assert self._socket.poll(10_000)
        return self._socket.recv()

    def close(self) -> None:
        self._socket.close()
        self._server.close()
        self._context.term()


@pytest.fixture
def plane() -> Iterator[Plane]:
    plane = Plane()
    yield plane
    plane.close()


def golden() -> dict[str, bytes]:
    lines = [line.rpartition(": ") for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    return {name: bytes.fromhex(message) for name, _, message in lines}


def test_requests_are_those_of_version_1() -> None:
    kept = golden()
    for name, request in requests().items():
        assert request.hex(" ", 4) == kept[f"{name} request"].hex(" ", 4), name


def test_replies_are_those_of_version_1(plane: Plane) -> None:
    kept = golden()
    answered = {name: plane.answer(name, kept[f"{name} request"]) for name in requests()}
    for name, reply in answered.items():
        assert reply.hex(" ", 4) == kept[f"{name} reply"].hex(" ", 4), name
    assert len(kept) == 2 * len(answered), "a golden message that nothing compares"


def test_golden_replies_are_understood() -> None:
    kept = golden()
    reply = unpack_reply(kept["GET reply"], Kind.GET, 3)
    assert reply is not None
    assert (reply.ok, reply.boot, reply.count) == (True, BOOT, 2)
    assert reply.body == b"\1\0" + _location().tobytes()
    reply = unpack_reply(kept["CONNECT reply"], Kind.CONNECT, 5)
    assert reply is not None
    assert unpack_connected(reply.body) == (b"other half", b"region")
    reply = unpack_reply(kept["COUNTERS reply"], Kind.COUNTERS, 10)
    assert reply is not None
    assert decode_counters(reply.body) == COUNTERS
    reply = unpack_reply(kept["PROBE wrong boot reply"], Kind.PROBE, 8)
    assert reply is not None
    assert reply.status is ReplyStatus.WRONG_BOOT
