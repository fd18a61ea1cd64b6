"""The control plane: who gets in, what is answered, and by when."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
import zmq

from p2pkv import _native
from p2pkv.control.admission import Admission
from p2pkv.control.secret import ClusterKeys
from p2pkv.control.sockets import ControlClient, ControlServer, Request, Socket
from p2pkv.control.wire import (
    HEADER,
    MAGIC,
    MAX_MESSAGE,
    REPLY,
    VERSION,
    Kind,
    ReplyStatus,
    pack_request,
    unpack_reply,
)
from p2pkv.directory.view import node_key
from p2pkv.errors import ClosedError, ControlError, VersionError
from p2pkv.testing.lateness import returns_within
from p2pkv.testing.ports import free_port

BOOT = 17


def keys() -> ClusterKeys:
    public, private = zmq.curve_keypair()
    return ClusterKeys(public=public, private=private)


class Plane:
    """A server, and clients that may know its secret or not."""

    def __init__(self) -> None:
        self.keys = keys()
        self.context: zmq.Context[Socket] = zmq.Context()
        self.shard = _native.Shard(1024)
        self.server = ControlServer(self.context, self.keys, "127.0.0.1:0", self.shard)
        self.server.loop.announce(node_key("server"), BOOT)
        self.server.start()
        self.clients: list[ControlClient] = []

    def client(self, keys: ClusterKeys | None = None) -> ControlClient:
        self.clients.append(ControlClient(self.context, keys or self.keys))
        return self.clients[-1]

    def probes(self, client: ControlClient, timeout: float = 2.0) -> bool:
        return client.ask(Request(self.server.address, Kind.PROBE), timeout) is not None

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()
        self.context.term()


@pytest.fixture
def plane() -> Iterator[Plane]:
    plane = Plane()
    yield plane
    plane.close()


def test_a_node_with_the_secret_is_answered(plane: Plane) -> None:
    reply = plane.client().ask(Request(plane.server.address, Kind.PROBE), 2.0)
    assert reply is not None
    assert reply.ok
    assert reply.boot == BOOT


def test_a_stranger_who_knows_the_servers_key_only_is_refused(plane: Plane) -> None:
    public, private = zmq.curve_keypair()
    with plane.context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.curve_serverkey = plane.keys.public
        stranger.curve_publickey, stranger.curve_secretkey = public, private
        stranger.connect(f"tcp://{plane.server.address}")
        stranger.send(pack_request(Kind.PROBE, 1, boot=0, count=1, body=b""))
        assert stranger.poll(500) == 0
    assert plane.server.refused > 0
    assert plane.probes(plane.client())


def test_a_stranger_with_another_secret_learns_nothing(plane: Plane) -> None:
    assert not plane.probes(plane.client(keys()), 0.5)


def test_a_stranger_without_curve_learns_nothing(plane: Plane) -> None:
    with plane.context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{plane.server.address}")
        stranger.send(pack_request(Kind.PROBE, 1, boot=0, count=1, body=b""))
        assert stranger.poll(500) == 0


def test_without_a_living_zap_handler_nobody_gets_in(plane: Plane) -> None:
    plane.server.stop_admitting()
    assert not plane.probes(plane.client(), 0.5)


def test_without_an_enforced_domain_a_dead_handler_would_let_strangers_in(plane: Plane) -> None:
    # The sabotage of the test above: the safeguard that keeps strangers out is ZAP_ENFORCE_DOMAIN.
    context: zmq.Context[Socket] = zmq.Context()
    with context.socket(zmq.REP) as server, context.socket(zmq.REQ) as stranger:
        server.linger = stranger.linger = 0
        server.curve_server = True
        server.curve_secretkey = plane.keys.private
        port = server.bind_to_random_port("tcp://127.0.0.1")
        stranger.curve_serverkey = plane.keys.public
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(f"tcp://127.0.0.1:{port}")
        stranger.send(b"hello")
        assert server.poll(2000)
    context.term()


def test_a_request_for_an_earlier_boot_is_refused(plane: Plane) -> None:
    reply = plane.client().ask(Request(plane.server.address, Kind.PROBE, boot=BOOT - 1), 2.0)
    assert reply is not None
    assert reply.status is ReplyStatus.WRONG_BOOT
    assert reply.boot == BOOT


def test_a_node_that_is_no_member_answers_nothing(plane: Plane) -> None:
    plane.server.loop.withdraw()
    assert not plane.probes(plane.client(), 0.3)


@pytest.mark.parametrize("kind", [Kind.GET, Kind.PUT, Kind.DROP, Kind.CONNECT])
def test_a_body_of_a_wrong_length_is_refused_and_the_node_goes_on(plane: Plane, kind: Kind) -> None:
    client = plane.client()
    for body, count in ((b"x", 1), (b"\xff" * 88, 2), (b"\xff" * 16, 2**32 - 1)):
        reply = client.ask(Request(plane.server.address, kind, body, count), 2.0)
        assert reply is not None
        assert reply.status in (ReplyStatus.MALFORMED, ReplyStatus.REFUSED)
    assert plane.probes(client)


def test_an_unknown_kind_is_refused(plane: Plane) -> None:
    with plane.client().send([Request(plane.server.address, 999)]) as calls:  # type: ignore[arg-type]
        answer = calls.next(2.0)
    assert answer is not None
    assert answer[1].status is ReplyStatus.MALFORMED


def _raw(plane: Plane, message: bytes) -> bytes | None:
    with plane.context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.curve_serverkey = peer.curve_publickey = plane.keys.public
        peer.curve_secretkey = plane.keys.private
        peer.connect(f"tcp://{plane.server.address}")
        peer.send(message)
        return peer.recv() if peer.poll(500) else None


def test_another_version_is_told_both_numbers(plane: Plane) -> None:
    message = bytearray(pack_request(Kind.PROBE, 9, boot=0, count=1, body=b""))
    message[4:6] = (99).to_bytes(2, "little")
    answer = _raw(plane, bytes(message))
    assert answer is not None
    assert HEADER.unpack_from(answer)[1] == 1
    with pytest.raises(VersionError, match="speaks protocol version 1"):
        unpack_reply(answer, Kind.PROBE, 9)


def test_what_is_no_message_is_dropped_and_counted(plane: Plane) -> None:
    for garbage in (b"", b"short", b"\0" * 32, os.urandom(4096)):
        assert _raw(plane, garbage) is None
    assert plane.server.loop.stats()["malformed"] >= 4
    assert plane.probes(plane.client())


def test_a_message_above_the_limit_drops_its_sender_only(plane: Plane) -> None:
    other = plane.client()
    assert plane.probes(other)
    assert _raw(plane, b"\0" * (MAX_MESSAGE + 1)) is None
    assert plane.probes(other)


def test_garbage_on_the_port_is_dropped_and_the_node_goes_on(plane: Plane) -> None:
    host, port = plane.server.address.split(":")
    for garbage in (b"GET / HTTP/1.0\r\n\r\n", b"\0" * 1000, struct.pack("<Q", 2**63) * 8, os.urandom(5000)):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(garbage)
            stranger.settimeout(5)
            try:
                while stranger.recv(4096):
                    pass  # ZMQ's greeting; then it hangs up
            except ConnectionResetError:
                continue
    assert plane.probes(plane.client())


def test_a_request_returns_by_its_deadline_when_nobody_answers(plane: Plane) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = plane.client()
        with returns_within(0.3 + 0.1):
            assert client.ask(Request(f"127.0.0.1:{silent.getsockname()[1]}", Kind.PROBE), 0.3) is None


def test_one_silent_peer_does_not_hold_up_the_others(plane: Plane) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        requests = [Request(f"127.0.0.1:{silent.getsockname()[1]}", Kind.PROBE)]
        requests.append(replace(requests[0], address=plane.server.address))
        with plane.client().send(requests) as calls:
            answer = calls.next(2.0)
            assert answer is not None
            assert answer[0] == 1


def test_closing_ends_calls_under_way(plane: Plane) -> None:
    client = plane.client()
    client.close()
    with pytest.raises(ClosedError):
        plane.probes(client)


def test_an_address_that_is_taken_is_named(plane: Plane) -> None:
    context: zmq.Context[Socket] = zmq.Context()
    with pytest.raises(
        ControlError, match=f"cannot listen on {plane.server.address}: Address already in use"
    ):
        ControlServer(context, plane.keys, plane.server.address, plane.shard)
    context.term()


def test_a_second_address_is_served_too(plane: Plane) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    with socket.create_server(("127.0.0.1", port)):
        assert not plane.server.listen_also(address)
    assert plane.server.listen_also(address)
    assert not plane.server.listen_also("203.0.113.1:7400")
    reply = plane.client().ask(Request(address, Kind.PROBE), 2.0)
    assert reply is not None
    assert reply.ok


def test_a_socket_that_nobody_uses_is_closed_in_the_end(plane: Plane) -> None:
    now = 100.0
    client = ControlClient(plane.context, plane.keys, now=lambda: now)
    plane.clients.append(client)
    gone, there = (f"127.0.0.1:{free_port()}" for _ in range(2))
    for address in (gone, there):
        assert plane.server.listen_also(address)
        assert client.ask(Request(address, Kind.PROBE), 10.0) is not None
    for _ in range(2):
        now += 400.0
        assert client.ask(Request(there, Kind.PROBE), 10.0) is not None
    assert client.has_idle(there)
    assert not client.has_idle(gone), "nothing has said that its node is gone"


def test_a_peer_that_sends_what_nobody_asked_for_is_read_no_further(plane: Plane) -> None:
    context: zmq.Context[Socket] = zmq.Context()
    admission = Admission(context, plane.keys, "p2pkv")
    liar = context.socket(zmq.ROUTER)
    admission.guard(liar, max_message=MAX_MESSAGE)
    liar.sndhwm = 1
    liar.router_mandatory = True
    liar.sndtimeo = 2000
    port = liar.bind_to_random_port("tcp://127.0.0.1")
    client = plane.client()
    with client.send([Request(f"127.0.0.1:{port}", Kind.PROBE)]) as calls:
        peer, asked = liar.recv_multipart()
        _, _, kind, request_id, *_ = HEADER.unpack_from(asked)
        liar.send_multipart([peer, HEADER.pack(MAGIC, VERSION, kind | REPLY, request_id, BOOT, 1, 0)])
        assert calls.next(10.0) is not None

    def flood() -> None:
        for _ in range(64):  # MiB: more than the kernel holds for the two
            liar.send_multipart([peer, bytes(MAX_MESSAGE - 100)])

    with pytest.raises(zmq.Again):
        flood()
    admission.close()
    context.destroy(0)
