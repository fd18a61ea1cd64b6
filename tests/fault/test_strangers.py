"""Garbage on every door of a running node, and memory that is handed out: nothing breaks, leaks or can be written."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster import Cluster, NodeProcess, all_are_fetched, eventually
from footprint import Footprint, abstract_sockets, tcp_ports
from pair import Pair

KEYS = [f"page-{i}" for i in range(32)]
NBYTES = 4096
N_STRANGERS = 3000

ZMTP_NULL = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
ZMTP_CURVE = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
ZMTP_PLAIN = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + b"\0" + bytes(31)
READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
HUGE_FRAME = b"\x02" + struct.pack(">Q", 2**63 - 1)
TCP_HELLO, SHM_HELLO, TCP_REQUEST, SHM_REQUEST = 0x48543250, 0x48533250, 0x51543250, 0x51533250


def message(rng: random.Random) -> bytes:
    """Return what somebody without the secret may send: noise, other protocols, ours with lies in it."""
    noise = rng.randbytes(rng.randrange(1, 400))
    version = rng.choice([0, 1, 2, 0xFFFF])
    hello = struct.pack("<IHH", rng.choice([TCP_HELLO, SHM_HELLO]), version, 0) + rng.randbytes(32)
    request = struct.pack("<IHHQII", TCP_REQUEST, version, 0, 1, rng.choice([1, 8192, 2**32 - 1]), 0)
    return rng.choice(
        [
            noise,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise,
            bytes(rng.randrange(1, 4096)),
            b"\xff" * rng.randrange(1, 4096),
            struct.pack("<Q", 2**63) * 8,
            ZMTP_NULL[: rng.randrange(1, 64)],
            ZMTP_NULL + READY + b"\x00\x20" + b"p2kv" + noise,
            ZMTP_CURVE + b"\x04\xc8\x05HELLO" + rng.randbytes(194),
            ZMTP_CURVE + HUGE_FRAME + noise,
            ZMTP_PLAIN + b"\x04\x08\x05HELLO\x00\x00",
            hello,
            hello[:-1],
            hello + request + noise,
            request,
            struct.pack("<IHHII", SHM_REQUEST, version, 0, 0, 0),
            b"p2kv" + struct.pack("<HHQQII", version, 2, 7, 0, 2**32 - 1, 0) + noise,
        ]
    )


def dial(door: int | str) -> socket.socket:
    if isinstance(door, int):
        return socket.create_connection(("127.0.0.1", door), 10.0)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(10.0)
    stranger.connect(b"\0" + door.encode())
    return stranger


def knock(door: int | str, rng: random.Random) -> bytes:
    """Connect, talk, and return what came back; some hang up in the middle, some don't listen."""
    heard = b""
    with dial(door) as stranger:
        try:
            for _ in range(rng.randrange(4)):
                stranger.sendall(message(rng))
            if rng.random() < 0.1:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            elif rng.random() < 0.1:
                stranger.shutdown(socket.SHUT_WR)
                while part := stranger.recv(4096):
                    heard += part
        except OSError as error:
            assert error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)  # noqa: PT017 - hung up on
    return heard


def state(node: NodeProcess) -> tuple[object, ...]:
    counters = node.call("counters")
    kept = (
        "p2pkv_shard_entries",
        "p2pkv_shard_tombstones",
        "p2pkv_pool_pages",
        "p2pkv_published_pages_total",
    )
    return node.call("members"), {name: counters.get(name) for name in kept}


def test_garbage_on_every_door_changes_nothing(cluster: Cluster) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    node = cluster.start("node")  # the first: it holds the join address too
    reader = cluster.start("reader")
    cluster.meet(node, reader)
    assert all(node.call("publish", keys=KEYS, nbytes=NBYTES))
    all_are_fetched(reader, KEYS, NBYTES)
    doors: list[int | str] = [*tcp_ports(node.pid), *abstract_sockets(node.pid)]
    join_port = int(cluster.join.rpartition(":")[2])
    print(doors)
    assert join_port in doors
    assert len([door for door in doors if isinstance(door, int)]) >= 3, "control, join and data port"
    assert len([door for door in doors if isinstance(door, str)]) == 1, "the socket of shm"
    for door in doors:
        for _ in range(20):
            knock(door, rng)
    eventually(lambda: len(state(node)) == 2, 10.0)
    before, footprint = state(node), Footprint.of(node.pid)
    learned: dict[int | str, set[bytes]] = {door: set() for door in doors}
    for i in range(N_STRANGERS):
        door = doors[i % len(doors)]
        learned[door].add(knock(door, rng))
    # ZMQ greets whoever connects: version, mechanism, padding. Nothing else is said, and elsewhere nothing at all.
    greeting = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"CURVE".ljust(52, b"\0")
    for door, answers in learned.items():
        for answer in answers - {b""}:
            assert isinstance(door, int), f"the socket of shm answered {answer!r}"
            assert greeting.startswith(answer), f"port {door} answered {answer!r}"
    all_are_fetched(reader, KEYS, NBYTES)
    eventually(lambda: Footprint.of(node.pid).is_as_flat_as(footprint, rss=8 << 20), 20.0)
    assert state(node) == before
    newcomer = cluster.start("newcomer")
    eventually(lambda: all(newcomer.call("fetch", keys=KEYS, nbytes=NBYTES)["hits"]), 10.0)


# a pool's memory, as its readers get it


@contextmanager
def fails(*numbers: int) -> Iterator[None]:
    with pytest.raises(OSError) as caught:
        yield
    assert caught.value.errno in numbers


def punch_hole(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size, punch = 1, 2
    if libc.fallocate(fd, keep_size | punch, ctypes.c_long(0), ctypes.c_long(4096)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def attacks(fd: int, nbytes: int) -> list[Callable[[], object]]:
    return [
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, nbytes - 4096),
        lambda: os.ftruncate(fd, nbytes + 4096),
        lambda: punch_hole(fd),
        lambda: mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close(),
    ]


def test_a_pool_that_is_handed_out_can_only_be_read(tmp_path: Path) -> None:
    pair = Pair(tmp_path, transports=["shm"])
    keys = pair.publish()
    assert pair.fetch_is_right(keys)
    pool = pair.owner._parts.caching.pool
    inode = os.fstat(pool.fd).st_ino
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mine = {fields[1]: fields[0] for fields in mappings if len(fields) > 5 and fields[4] == str(inode)}
    assert sorted(mine) == ["r--s", "rw-s"], "the owner's mapping, and the reader's"
    begin, end = (int(part, 16) for part in mine["r--s"].split("-"))
    libc = ctypes.CDLL(None, use_errno=True)
    assert (
        libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.PROT_READ | mmap.PROT_WRITE)
        == -1
    )
    assert ctypes.get_errno() in (errno.EACCES, errno.EPERM)
    # Whoever runs as the same user can open the file anew through /proc, for writing even.
    fd = os.open(f"/proc/self/fd/{pool.fd}", os.O_RDWR)
    for attack in attacks(fd, pool.nbytes):
        with fails(errno.EPERM, errno.EACCES):
            attack()
    os.close(fd)
    assert pair.fetch_is_right(keys)
    pair.close()


def test_without_its_seals_the_same_memory_could_be_written() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 16384)
    for attack in attacks(fd, 16384):
        attack()
    os.close(fd)
