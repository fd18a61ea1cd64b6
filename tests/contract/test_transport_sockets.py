"""What the listening sockets of shm and tcp answer to peers that speak the protocol, but badly."""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from p2pkv._native import SharedRegion
from p2pkv.errors import TransportError
from p2pkv.testing.lateness import returns_within
from p2pkv.testing.transport_fixtures import ENOUGH, Reader, eventually, settled
from p2pkv.testing.transport_peer import NBYTES, PAGE, TABLE, page_spans, usage
from p2pkv.transports.base import NO_WORD
from p2pkv.transports.native import ShmTransport, TcpTransport
from strangers import CHUNK, TRAILER, Owner


@pytest.fixture(params=[ShmTransport, TcpTransport], ids=["shm", "tcp"])
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    with request.param() as transport:
        yield Owner(transport)


@pytest.fixture
def tcp() -> Iterator[Owner]:
    with TcpTransport() as transport:
        yield Owner(transport)


@pytest.fixture
def shm() -> Iterator[Owner]:
    with ShmTransport() as transport:
        yield Owner(transport)


def is_dropped(stranger: socket.socket) -> bool:
    """Whether the server hangs up without having said a word."""
    with stranger:
        try:
            return stranger.recv(1) == b""
        except ConnectionResetError:
            return True


def test_only_a_live_token_of_this_version_is_let_in(owner: Owner) -> None:
    token = owner.token()
    wrong = bytes([token[0] ^ 1]) + token[1:]
    for hello in (
        owner.hello(wrong),
        owner.hello(bytes(32)),
        owner.hello(owner.token(), version=2),
        owner.hello(owner.token(), magic=b"HTTP"),
    ):
        stranger = owner.connect()
        stranger.sendall(hello)
        assert is_dropped(stranger)
    first = owner.connect()
    first.sendall(owner.hello(token))
    second = owner.connect()
    second.sendall(owner.hello(token))
    assert is_dropped(second), "a token admitted twice"
    first.close()
    assert owner.serves_well()


def test_a_closed_endpoint_revokes_its_tokens_and_hangs_up(owner: Owner) -> None:
    with owner.transport.open() as grant:
        half = grant.describe()
        tokens = [half[32:64], half[64:96]] if owner.transport.name == "tcp" else [half[48:80]]
        stranger = owner.connect()
        stranger.sendall(owner.hello(tokens[0]))
        assert owner.serves_well()  # the door has seen to the stranger by now
    assert is_dropped(stranger)
    late = owner.connect()
    late.sendall(owner.hello(tokens[-1]))
    assert is_dropped(late)


def test_silent_strangers_hold_nobody_up_and_are_bounded(owner: Owner) -> None:
    before = usage()["fds"]
    strangers = [owner.connect() for _ in range(300)]
    strangers[-1].sendall(owner.hello(owner.token())[:20])
    assert owner.serves_well()
    assert usage()["fds"] - before <= 300 + 256 + 8, "more visitors than the door has room for"
    assert is_dropped(strangers[0]), "the oldest makes room"
    for stranger in strangers:
        stranger.close()
    assert eventually(lambda: usage()["fds"] <= before)


def test_tcp_drops_requests_that_no_reader_of_ours_makes(tcp: Owner) -> None:
    region = tcp.region_id
    no_word = int(NO_WORD)
    span = (region, 0, TABLE, 8, 0)
    before = usage()["resident"]
    for request in (
        tcp.request(span, version=2),
        tcp.request(n=0),
        tcp.request(n=8193),
        tcp.request(n=2**32 - 1),
        tcp.request((region, 0, NBYTES - 7, 8, 0)),
        tcp.request((region, 0, 2**64 - 1, 8, 0)),
        tcp.request((region, 0, 8, 2**64 - 1, 0)),
        tcp.request((region, 1, 0, 8, NBYTES - 7)),
        tcp.request((region, 1, 0, 8, 4)),
        tcp.request((region, 1, 0, 8, no_word)),
        tcp.request((region, 2, 0, 8, 0)),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ):
        stranger = tcp.enter()
        stranger.sendall(request)
        assert is_dropped(stranger), request[:64]
    assert usage()["resident"] - before < 8 << 20
    assert tcp.serves_well()


def test_tcp_answers_byte_by_byte_as_documented(tcp: Owner) -> None:
    tcp.memory.rewrite(0, 6)
    with tcp.enter() as stranger:
        spans = (
            (tcp.region_id, 1, TABLE, 16, 0),
            (tcp.region_id, 0, 0, 8, 0),
            (tcp.region_id ^ 1, 0, 0, 8, 0),
        )
        request = tcp.request(*spans)
        for at in range(len(request)):  # a request may come in any pieces
            stranger.sendall(request[at : at + 1])
        answer = b""
        expected = CHUNK.pack(b"P2TC", 0, 7, 2, 0, 24) + struct.pack("<QQQ", 6, 6, 6)
        expected += TRAILER.pack(0, 1) + struct.pack("<Q", 6)
        expected += CHUNK.pack(b"P2TC", 1, 7, 1, 0, 0)
        while len(answer) < len(expected):
            answer += stranger.recv(4096)
        assert answer == expected


def test_tcp_readers_that_stop_reading_hold_up_neither_the_others_nor_close(tcp: Owner) -> None:
    strangers = [tcp.enter() for _ in range(4)]
    for stranger in strangers:
        stranger.sendall(tcp.request(*[(tcp.region_id, 0, 0, NBYTES, 0)] * 64))
    assert tcp.serves_well()
    with returns_within(1.0):
        tcp.memory.region.close()
        tcp.transport.close()
    for stranger in strangers:
        stranger.close()


def test_shm_drops_requests_that_no_reader_of_ours_makes(shm: Owner) -> None:
    good = struct.pack("<4sHHII", b"P2SQ", 1, 0, shm.region_id, 0)
    for request in (
        good[:-1],
        good + b"x",
        b"x" * 16,
        struct.pack("<4sHHII", b"P2SQ", 2, 0, shm.region_id, 0),
    ):
        stranger = shm.enter()
        stranger.sendall(request)
        assert is_dropped(stranger)
    assert shm.serves_well()


def test_shm_hands_out_a_descriptor_that_can_only_be_read(shm: Owner) -> None:
    with shm.enter() as stranger:
        stranger.sendall(struct.pack("<4sHHII", b"P2SQ", 1, 0, shm.region_id, 0))
        reply, ancillary, _, _ = stranger.recvmsg(64, socket.CMSG_SPACE(4))
    assert struct.unpack("<4sIIIQ", reply) == (b"P2SA", 0, shm.region_id, 0, NBYTES)
    fds = array.array("i", ancillary[0][2])
    with os.fdopen(fds[0], "rb", buffering=0) as memfd:
        with mmap.mmap(memfd.fileno(), NBYTES, access=mmap.ACCESS_READ) as mapped:
            assert mapped[TABLE : TABLE + 8] == struct.pack("<Q", 2)
        with pytest.raises(PermissionError):
            mmap.mmap(memfd.fileno(), NBYTES, access=mmap.ACCESS_WRITE)
        with pytest.raises(PermissionError):
            os.write(memfd.fileno(), b"x")
        for nbytes in (0, NBYTES - 4096, NBYTES + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(memfd.fileno(), nbytes)
        with (
            open(f"/proc/self/fd/{memfd.fileno()}", "r+b", buffering=0) as again,
            pytest.raises(PermissionError),
        ):
            again.write(b"x")
    assert (shm.memory.words == 2).all()


def test_shm_makes_only_whole_sealed_memory_readable(shm: Owner) -> None:
    plain = np.zeros(PAGE, np.uint8)
    shared = SharedRegion.create(PAGE)

    class Unsealed:
        fd = os.memfd_create("unsealed")

    os.ftruncate(Unsealed.fd, PAGE)
    register = shm.transport.register_memory
    with pytest.raises(TransportError, match="sealed"):
        register(plain, plain.ctypes.data, PAGE, readable=True)
    with pytest.raises(TransportError, match="sealed"):
        register(Unsealed(), plain.ctypes.data, PAGE, readable=True)
    with pytest.raises(TransportError, match="whole"):
        register(shared, shared.address, PAGE // 2, readable=True)
    os.close(Unsealed.fd)


def test_shm_mappings_go_with_the_last_endpoint() -> None:
    def n_mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("r--s" in line and "memfd:p2pkv" in line for line in maps)

    with ShmTransport() as transport, ShmTransport() as ours:
        owner = Owner(transport)
        reader = Reader(ours)
        endpoints = []
        for _ in range(3):
            endpoint, remote = reader.connect(transport.accept, owner.memory.region.describe())
            assert settled(endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)) == [
                "OK"
            ]
            endpoints.append((endpoint, remote))
            assert n_mapped() == 1, "endpoints to one region share its mapping"
        for endpoint, _ in endpoints:
            endpoint.close()
        assert eventually(lambda: n_mapped() == 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_closes_everything_takes_nothing_down(owner: Owner) -> None:
    with type(owner.transport)() as transport:
        reader = Reader(transport)
        endpoint, remote = reader.connect(owner.transport.accept, owner.memory.region.describe())
        assert settled(endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)) == [
            "OK"
        ]
        child = os.fork()
        if child == 0:
            try:
                endpoint.close()
                transport.close()
                owner.memory.region.close()
                owner.transport.close()
                del endpoint, remote, reader, transport
            finally:
                os._exit(0)
        assert eventually(lambda: os.waitpid(child, os.WNOHANG)[0] == child), "the child hangs"
        assert settled(endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)) == [
            "OK"
        ]
    assert owner.serves_well()
