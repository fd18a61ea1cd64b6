"""The front of transfers: every message of a link (docs/wire.md), as no node would send it, in any order."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hunts.frame import Broken, Stop, Tally
from hunts.timing import check_time
from link_peer import LinkPeer
from p2pkv import Config, Node, _native
from p2pkv.testing.lateness import Lateness
from p2pkv.transfers import RowStatus

GRACE = 0.1
ROW = 4096
_HEADER = "<IHHQQII"
_HEADER_NBYTES = struct.calcsize(_HEADER)
_MAGIC, _REPLY = 0x766B3270, 0x8000
_INTRODUCE, _REACH, _JOIN, _OFFER, _ASK, _ASK_END, _PULLED, _SETTLED, _WITHDRAWN, _GONE = range(0x40, 0x4A)
_EDGES = [0, 1, 63, 64, ROW, 2**20, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - ROW, 2**64 - 1]
_ROGUE = 0xEE


class Rogue:
    """Writes messages: each is right but for what the dice say. A wild one is soon hung up on, a tame one goes far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.wildness = 1.0

    def u64(self) -> int:
        chance = self.rng.random()
        if chance < 0.5:
            return self.rng.choice(_EDGES)
        return self.rng.getrandbits(self.rng.randint(1, 64)) if chance < 0.8 else self.rng.randrange(16)

    def u32(self) -> int:
        return self.u64() & 0xFFFFFFFF

    def maybe(self, value: int, other: Callable[[], int], one_in: int = 8) -> int:
        return other() if self.rng.random() * one_in < self.wildness else value

    def message(self, kind: int, body: bytes, request: int = 1, status: int = 0) -> bytes:
        count = self.maybe(1, self.u32, 30)
        version = self.maybe(1, lambda: self.u32() & 0xFFFF, 100)
        magic = self.maybe(_MAGIC, self.u32, 200)
        return struct.pack(_HEADER, magic, version, kind, request, 0, count, status) + body

    def offer(self) -> bytes:
        """Rows that would be pulled, or whose lengths add up to little."""
        name = self.name()
        rows = [(self.offset(), self.length()) for _ in range(self.rng.randint(1, 4))]
        if self.rng.random() < 0.1:  # padded they add up to one row, modulo 2^64
            big = self.rng.choice([2**16, 2**20])
            rows = [(0, big), (0, 2**64 - big + ROW)]
        number, ask = self.rng.randrange(1, 40), self.rng.choice([0, 0, self.rng.randrange(1, 8)])
        lease, first = self.maybe(300, self.u32, 3), self.maybe(self.rng.randrange(4), self.u32)
        n, size = self.maybe(len(rows), self.u32, 20), self.maybe(len(name), self.u32, 20)
        body = struct.pack("<QQIIII", number, ask, lease, first, n, size) + name
        return body + b"".join(struct.pack("<IIQQ", self.maybe(5, self.u32), 0, *row) for row in rows)

    def offset(self) -> int:
        return self.maybe(0, self.u64, 4)

    def length(self) -> int:
        return self.maybe(ROW, self.u64, 4)

    def name(self) -> bytes:
        return self.rng.choice([b"rogue", b"r", b"n" * 512])

    def any(self) -> bytes:
        """A message of any kind, whole, cut short or with a changed byte."""
        kind = self.rng.choice([_OFFER] * 4 + list(range(_INTRODUCE, _GONE + 1)))
        body = self.body(kind)
        if self.maybe(0, lambda: 1, 10):
            body = body[: self.rng.randrange(len(body) + 1)]
        if body and self.maybe(0, lambda: 1, 10):
            at = self.rng.randrange(len(body))
            body = body[:at] + bytes([self.rng.randrange(256)]) + body[at + 1 :]
        kind = self.maybe(kind, lambda: self.u32() & 0xFFFF, 20)
        return self.message(kind, body, self.rng.randrange(1, 10))

    def body(self, kind: int) -> bytes:
        if kind == _OFFER:
            return self.offer()
        if kind == _ASK:
            name = self.name()
            asks = (self.rng.randrange(1, 6), self.u32(), self.u32(), self.maybe(8, self.u32, 2), len(name))
            return struct.pack("<QIIII", *asks) + name
        if kind in (_ASK_END, _WITHDRAWN):
            return struct.pack("<Q", self.rng.randrange(1, 40))
        if kind == _PULLED:
            n = self.rng.randrange(4)
            return struct.pack("<QII", self.u64(), self.maybe(n, self.u32), 0) + self.rng.randbytes(n)
        if kind == _SETTLED:
            return struct.pack("<QII", self.rng.randrange(1, 40), self.rng.choice([0, 1, 9]), 0)
        if kind == _GONE:
            return struct.pack(
                "<QII", self.rng.randrange(1, 40), self.maybe(0, self.u32, 2), self.maybe(1, self.u32, 2)
            )
        if kind == _INTRODUCE:
            return struct.pack("<QQ", self.u64(), 1)
        if kind in (_REACH, _JOIN) and not self.maybe(0, lambda: 1):
            return struct.pack("<I", 3) + b"tcp" + self.rng.randbytes(24)
        return self.rng.randbytes(self.rng.randrange(40))


class RogueLinks:
    """Links to one node, one after the other; what the node asks is answered, so that it reads what is offered."""

    def __init__(self, rng: random.Random, node: Node, tally: Tally) -> None:
        self.rng = rng
        self.rogue = Rogue(rng)
        self.tally = tally
        self._native = node.transfers._native
        self._rows = np.full(2**20 // ROW * ROW * 2, _ROGUE, np.uint8)
        self._transport = _native.tcp_transport()
        self._region = self._transport.register_memory(self._rows.ctypes.data, self._rows.nbytes, -1, True)

    def run(self, is_over: threading.Event) -> None:
        key = 1000
        while not is_over.is_set():
            key += 1
            self.rogue.wildness = self.rng.choice([0.0, 0.1, 1.0])
            peer = LinkPeer(self.rng.randbytes(32), self.rng.randbytes(32))
            try:
                self._open(peer, key)
                for _ in range(self.rng.randint(1, 60)):
                    if is_over.is_set():
                        break
                    peer.send(self.rogue.any())
                    self.tally["hostile messages"] += 1
                    while (message := peer.receive_within(0.002)) is not None:
                        self._answer(peer, message)
            except (AssertionError, OSError, RuntimeError):
                self.tally["links cut"] += 1  # as it should be
            finally:
                peer.close()

    def close(self) -> None:
        self._transport.close()

    def _open(self, peer: LinkPeer, key: int) -> None:
        with ThreadPoolExecutor(1) as threads:
            connected = threads.submit(self._native.connect, key, 1, peer.door, 10.0)
            peer.accept()
            _, _, kind, request, *_ = struct.unpack_from(_HEADER, peer.receive())
            peer.send(struct.pack(_HEADER, _MAGIC, 1, kind | _REPLY, request, 0, 1, 0))
            connected.result()

    def _answer(self, peer: LinkPeer, message: bytes) -> None:
        _, _, kind, request, *_ = struct.unpack_from(_HEADER, message)
        body = message[_HEADER_NBYTES:]
        lies = self.rng.randrange(8) == 0
        if kind == _REACH:
            parts = [b"tcp", b"tcp", self.rng.randbytes(24) if lies else self._region.describe()]
            ways = b"".join(struct.pack("<I", len(part)) + part for part in parts)
            answer = struct.pack("<I", self.rogue.maybe(1, self.rogue.u32)) + ways
            peer.send(struct.pack(_HEADER, _MAGIC, 1, kind | _REPLY, request, 0, 1, 0) + answer)
        elif kind == _JOIN:
            (n,) = struct.unpack_from("<I", body)
            half = self._transport.accept(body[4 + n :])
            half = self.rng.randbytes(len(half)) if lies else half
            peer.send(struct.pack(_HEADER, _MAGIC, 1, kind | _REPLY, request, 0, 1, 0) + half)
        elif kind == _PULLED and not lies:
            (offer,) = struct.unpack_from("<Q", body)
            peer.send(self.rogue.message(_SETTLED, struct.pack("<QII", offer, 1, 0)))


class Honest:
    """Two nodes that transfer under names that nobody else knows."""

    def __init__(self, rng: random.Random, tally: Tally) -> None:
        self.rng = rng
        self.tally = tally
        settings = {"transports": "tcp", "pool_size": "1MiB", "transfer_lease": 1.0}
        buffer = rng.choice(["64KiB", "512KiB"])
        self.receiver = Node.start(Config(node_id="receiver", buffer_size=buffer, **settings))
        join = self.receiver.address
        self.producer = Node.start(Config(node_id="producer", buffer_size=0, join=join, **settings))
        until = time.monotonic() + 30.0
        while len(self.producer.members()) < 2 and time.monotonic() < until:
            time.sleep(0.002)  # looked at again
        self.source, self.target = (np.zeros((16, ROW), np.uint8) for _ in range(2))
        self.producer.register_memory(self.source, readable=True)
        self.receiver.register_memory(self.target, readable=True)

    def transfer(self) -> None:
        """Put or offer a row, take it, and look at it and at its neighbours."""
        name = f"honest {self.rng.getrandbits(64)}"
        row, value = self.rng.randrange(16), self.rng.randrange(1, _ROGUE)
        self.source[row], self.target[:] = value, 0
        spans, into = self._span(self.source, row), self._span(self.target, row)
        if self.rng.random() < 0.3:
            self.producer.transfers.offer(name, spans, lease=1.0)
            got = self._timed(
                "get", 0.5, lambda: self.receiver.transfers.get("producer", name, into, timeout=0.5)
            )
        else:
            offer = self._timed(
                "put_async",
                1.0,
                lambda: self.producer.transfers.put_async("receiver", name, spans, lease=1.0),
            )
            if self.rng.random() < 0.7:
                self._timed("wait", 0.1, lambda: offer.wait(0.1))  # so that it is stored
            got = self._timed(
                "receive", 0.5, lambda: self.receiver.transfers.receive(name, into, timeout=0.5)
            )
            offer.withdraw()
        if got[0] == RowStatus.OK and not (self.target[row] == value).all():
            raise Broken(f"row of {name} is OK, and {sorted(set(self.target[row].tolist()))} for {value}")
        self.target[row] = 0
        if self.target.any():
            raise Broken(f"a row beside that of {name} was written to")
        self.tally["rows right" if got[0] == RowStatus.OK else "rows not OK"] += 1

    def close(self) -> None:
        for node in (self.producer, self.receiver):
            self._timed("close", 2.0, node.close)

    @staticmethod
    def _span(
        rows: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], row: int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.array([[rows.ctypes.data + row * ROW, ROW]], np.int64)

    def _timed(self, what, seconds, call):  # type: ignore[no-untyped-def]
        with Lateness() as late:
            result = call()
            check_time(what, seconds + GRACE, late)
        return result


def attack(rng: random.Random, tally: Tally, stop: Stop) -> None:
    """Have one rogue say all it likes to each of two nodes that transfer."""
    honest = Honest(rng, tally)
    rogues = [
        RogueLinks(random.Random(rng.getrandbits(60)), node, tally)
        for node in (honest.receiver, honest.producer)
    ]
    is_over = threading.Event()
    threads = [threading.Thread(target=rogue.run, args=(is_over,)) for rogue in rogues]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            honest.transfer()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        honest.close()
        for rogue in rogues:
            rogue.close()
