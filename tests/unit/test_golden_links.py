"""The transfer link's messages, byte for byte: what version 1 said, this one still says and understands.

``tests/golden/links-v1.txt`` holds them in hex, one a line, in the order of the talk below; ``..`` is a byte that
differs from run to run (drawn numbers, and milliseconds that pass). A message that changes breaks older nodes: raise
the version and add a file, don't edit this one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from link_peer import LinkPeer
from p2pkv import _native
from p2pkv.metrics import Metrics
from p2pkv.peers.connections import PeerConnections
from p2pkv.transfers import RowStatus
from p2pkv.transports.native import TcpTransport

GOLDEN = Path(__file__).parents[1] / "golden" / "links-v1.txt"
OURS, OUR_BOOT, THEIRS = 0x1122334455667788, 0x17, 0xA1
TOKEN, KEY = bytes(range(32)), bytes(range(100, 132))
LEASE_S = 60.0
ROW = 4096
SECONDS = 30.0
HEADER = struct.calcsize("<IHHQQII")


def golden() -> dict[str, str]:
    lines = [line.rpartition(": ") for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    return {name: "".join(message.split()) for name, _, message in lines}


class Node:
    """The native transfers of a node, with two rows of memory that ``tcp`` serves and reads into."""

    def __init__(self) -> None:
        self.memory = np.zeros(2 * ROW, np.uint8)
        self.address = self.memory.ctypes.data
        self.transport = TcpTransport(streams=2)
        self.tcp = self.transport.native
        self.peers = PeerConnections([self.transport], lambda *_: None, Metrics())
        self._region = self.tcp.register_memory(self.address, self.memory.nbytes, -1, True)
        self.transfers = _native.Transfers.start(
            "127.0.0.1",
            "",
            [(0, "tcp", self.tcp)],
            self.peers.native,
            buffer_nbytes=0,
            buddy_pool_nbytes=0,
            staging_nbytes=0,
            keep_unclaimed_s=LEASE_S,
            is_validating=True,
        )
        self.transfers.announce(OURS, OUR_BOOT)
        registration = (0, self._region, b"a region of tcp")
        self.transfers.add_memory(self.address, self.memory.nbytes, True, 1, [registration])

    @property
    def rows(self) -> np.ndarray:
        return np.array([[self.address, ROW], [self.address + ROW, ROW]], np.int64)

    def close(self) -> None:
        self.transfers.close()
        self.peers.close()
        self._region.close()
        self.transport.close()


class Talk:
    """A link to the node, on which golden messages are sent and expected."""

    def __init__(self, node: Node) -> None:
        self.kept = golden()
        self.compared: set[str] = set()
        self._peer = LinkPeer(TOKEN, KEY)
        with ThreadPoolExecutor(1) as threads:
            door = self._peer.door
            connected = threads.submit(node.transfers.connect, THEIRS, 1, door, SECONDS)
            self._is("hello", self._peer.accept())
            self.hears("INTRODUCE request")
            self.says("INTRODUCE reply")
            connected.result()

    def _is(self, name: str, message: bytes) -> bytes:
        kept, found = self.kept[name], message.hex()
        assert len(found) == len(kept), f"{name}: {found}"
        bytewise = zip(range(0, len(kept), 2), kept[::2], kept[1::2], strict=True)
        masked = "".join(".." if a + b == ".." else found[i : i + 2] for i, a, b in bytewise)
        assert masked == kept, name
        self.compared.add(name)
        return message

    def hears(self, name: str) -> bytes:
        """Compare the node's next message with the golden one; return what follows its header."""
        return self._is(name, self._peer.receive())[HEADER:]

    def says(self, name: str, *drawn: bytes) -> None:
        """Send a golden message, ``drawn`` in the places of what differs."""
        parts = self.kept[name]
        for value in drawn:
            parts = parts.replace(".." * len(value), value.hex(), 1)
        assert "." not in parts, name
        self._peer.send(bytes.fromhex(parts))
        self.compared.add(name)

    def is_quiet(self) -> None:
        """The node has done what it was told, and says nothing of it: its next message is an answer to nonsense."""
        self.says("of a later version request")
        self.hears("of a later version reply")

    def close(self) -> None:
        self._peer.close()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.close()


@pytest.fixture
def talk(node: Node) -> Iterator[Talk]:
    talk = Talk(node)
    yield talk
    talk.close()


def offer(node: Node, talk: Talk) -> tuple[_native.Offer, bytes, bytes]:
    """Offer both rows; return the offer, its number and the number of the memory, as they were told."""
    made = node.transfers.offer(None, "request", 4, node.rows, LEASE_S, None)
    told = talk.hears("OFFER")
    return made, told[:8], told[32 + len("request") :][:4]


def produce(node: Node, talk: Talk) -> None:
    """What a producer hears and says."""
    talk.says("ASK")
    taken, number, source = offer(node, talk)
    talk.says("REACH request", source)
    talk.hears("REACH reply")
    talk.says("REACH of nothing request")
    talk.hears("REACH of nothing reply")
    talk.says("JOIN refused request")
    talk.hears("JOIN refused reply")
    talk.says("PULLED by the other", number)
    assert talk.hears("SETTLED")[:8] == number
    assert taken.statuses().tolist() == [RowStatus.OK, RowStatus.REJECTED]

    withdrawn, number, _ = offer(node, talk)
    withdrawn.withdraw(RowStatus.REJECTED)
    assert talk.hears("WITHDRAWN") == number
    talk.says("PULLED by the other", number)
    assert talk.hears("SETTLED too late")[:8] == number

    talk.says("ASK_END")
    talk.is_quiet()
    talk.says("ASK of what is over")
    talk.hears("GONE")
    talk.says("ASK_END")
    talk.is_quiet()
    node.transfers.offer(None, "request", 4, node.rows, LEASE_S, None)
    talk.is_quiet()


def receive(node: Node, talk: Talk) -> None:
    """What a receiver says and hears. The rows are read over the test's own tcp."""
    producer = _native.tcp_transport(streams=2)
    source = np.frombuffer(np.random.default_rng(1).bytes(2 * ROW), np.uint8)
    region = producer.register_memory(source.ctypes.data, source.nbytes, -1, True)
    grant = node.transfers.grant(THEIRS, "wanted", 0, node.rows, LEASE_S, None)
    ask = talk.hears("ASK by the node")[:8]
    talk.says("OFFER of the other", ask)
    talk.hears("REACH by the node")
    talk.says("REACH of the other reply", region.describe())
    half = talk.hears("JOIN by the node")[4 + len("tcp") :]
    talk.says("JOIN of the other reply", producer.accept(half))
    talk.hears("PULLED by the node")
    assert RowStatus.PENDING in grant.statuses(), "nothing counts before it is settled"
    talk.says("SETTLED by the other")
    grant.wait(SECONDS)
    assert grant.statuses().tolist() == [RowStatus.OK] * 2
    assert (node.memory == source).all()
    assert talk.hears("ASK_END by the node") == ask
    region.close()
    producer.close()
    grant = node.transfers.grant(THEIRS, "wanted", 0, node.rows, LEASE_S, None)
    ask = talk.hears("ASK by the node")[:8]
    talk.says("GONE by the other", ask)
    grant.wait(SECONDS)
    assert grant.statuses().tolist() == [RowStatus.GONE] * 2
    assert talk.hears("ASK_END by the node") == ask


def test_what_nodes_tell_each_other_of_offers_is_that_of_version_1(node: Node, talk: Talk) -> None:
    produce(node, talk)
    receive(node, talk)
    assert _native.Transfers.request().hex() == talk.kept["request for a door"]
    assert talk.compared | {"request for a door"} == set(talk.kept), "golden messages that nothing compares"
