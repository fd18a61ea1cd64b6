"""What a member may make of a link: nothing that costs others their rows, and so much memory and no more."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster import eventually
from link_peer import LinkPeer
from p2pkv import Node
from p2pkv.transfers import RowStatus
from transfer_pair import TransferPair

HEADER = "<IHHQQII"
INTRODUCE, OFFER, ASK, PULLED, SETTLED = 0x40, 0x43, 0x44, 0x46, 0x47
MAX_ROWS = 32768
REMEMBERED = 256 << 20
"""Of all links; docs/wire.md."""


class Member:
    """Somebody with the secret, on a link to a node, who says what it likes."""

    def __init__(self, node: Node, key: int = 66) -> None:
        self._peer = LinkPeer(bytes(32), bytes(range(32)))
        native = node.transfers._native
        with ThreadPoolExecutor(1) as threads:
            connected = threads.submit(native.connect, key, 1, self._peer.door, 30.0)
            self._peer.accept()
            kind, request, _ = self.hear()
            self.say(kind | 0x8000, b"", request)
            connected.result()

    def say(self, kind: int, body: bytes, request: int = 0) -> None:
        self._peer.send(struct.pack(HEADER, 0x766B3270, 1, kind, request, 0, 1, 0) + body)

    def hear(self) -> tuple[int, int, bytes]:
        message = self._peer.receive()
        _, _, kind, request, *_ = struct.unpack_from(HEADER, message)
        return kind, request, message[struct.calcsize(HEADER) :]

    def close(self) -> None:
        self._peer.close()


@pytest.fixture
def pair() -> Iterator[TransferPair]:
    pair = TransferPair(buffer_size=0)
    yield pair
    pair.close()


def offer(number: int, n_rows: int) -> bytes:
    name = f"{number}".encode()
    record = struct.pack("<QQIIII", number, 0, 3_600_000, 0, n_rows, len(name))
    return record + name + struct.pack("<IIQQ", 5, 0, 0, 4096) * n_rows


def test_offers_that_wait_are_bounded_and_leave_others_their_share(pair: TransferPair) -> None:
    greedy = Member(pair.consumer)
    n = REMEMBERED // (25 * MAX_ROWS) + 20
    for number in range(n):
        greedy.say(OFFER, offer(number, MAX_ROWS))
    kind, _, body = greedy.hear()
    assert kind == PULLED
    assert body[16] == RowStatus.CANCELED
    eventually(lambda: pair.counter("p2pkv_refused_offers_total") >= 10, 30.0)
    name = pair.name()
    pair.producer.transfers.put_async(pair.consumer.node_id, name, pair.from_rows(), lease=30.0)
    got = pair.consumer.transfers.receive(name, pair.to_rows(), timeout=30.0)
    assert (got == RowStatus.OK).all()
    assert pair.is_right()
    greedy.close()


def test_nobody_takes_an_offer_that_he_was_not_told_of(pair: TransferPair) -> None:
    member = Member(pair.producer)
    producer = pair.producer.transfers
    left = producer.offer("for anybody", pair.from_rows(0, 1), lease=30.0)
    member.say(ASK, struct.pack("<QIIII", 1, 30_000, 0, 1, 11) + b"for anybody")
    _, _, told = member.hear()
    (number,) = struct.unpack_from("<Q", told)
    put = producer.put_async(pair.consumer.node_id, "for one", pair.from_rows(1, 1), lease=30.0)
    member.say(PULLED, struct.pack("<QIIB", number + 1, 1, 0, RowStatus.OK))
    kind, _, verdict = member.hear()
    assert (kind, *struct.unpack("<QII", verdict)) == (SETTLED, number + 1, 0, 0)
    assert not put.done()
    member.say(PULLED, struct.pack("<QIIB", number, 1, 0, RowStatus.OK))
    _, _, verdict = member.hear()
    assert struct.unpack("<QII", verdict) == (number, 1, 0)
    assert left.done()
    got = pair.consumer.transfers.receive("for one", pair.to_rows(1, 1), timeout=30.0)
    assert (got == RowStatus.OK).all()
    member.close()


def test_who_says_again_who_it_is_is_hung_up_on(pair: TransferPair) -> None:
    member = Member(pair.producer)
    member.say(INTRODUCE, struct.pack("<QQ", 77, 1))
    with pytest.raises(AssertionError, match="hung up"):
        member.hear()
    member.close()
