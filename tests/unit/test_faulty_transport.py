"""Each fault of the faulty transport does the harm it is named for, and no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from p2pkv.errors import TransportError
from p2pkv.testing.transport_fixtures import ENOUGH, Reader, settled
from p2pkv.testing.transport_peer import PAGE, PagedMemory, page_spans, page_words
from p2pkv.transports.base import Endpoint, RemoteRegion
from p2pkv.transports.faulty import Faults, FaultyTransport
from p2pkv.transports.local import LocalTransport


class Broken:
    """A reader over a faulty transport, and the owner it reads from."""

    def __init__(self) -> None:
        self.owner = LocalTransport()
        self.memory = PagedMemory(self.owner)
        self.transport = FaultyTransport(LocalTransport())
        self.reader = Reader(self.transport)
        self.endpoint, self.remote = self.connect()

    def connect(self) -> tuple[Endpoint, RemoteRegion]:
        return self.reader.connect(self.owner.accept, self.memory.region.describe())

    def read(self, faults: Faults, timeout: float = ENOUGH, word: int = 2) -> list[str]:
        self.transport.faults = faults
        words = page_words([0, 1], [word, word])
        transfer = self.endpoint.read(self.reader.local, self.remote, page_spans([0, 1]), words=words)
        return settled(transfer.wait(timeout))

    def pages(self) -> list[bool]:
        """Whether the bytes of each page read are right."""
        halves = self.reader.bytes[: 2 * PAGE].view(np.uint64).reshape(2, -1)
        return [bool((half == 2).all()) for half in halves]


@pytest.fixture
def broken() -> Iterator[Broken]:
    broken = Broken()
    yield broken
    broken.transport.close()
    broken.owner.close()


def test_without_faults_it_is_the_inner_transport(broken: Broken) -> None:
    assert broken.read(Faults()) == ["OK", "OK"]
    assert broken.pages() == [True, True]
    assert broken.read(Faults(), word=4) == ["REJECTED", "REJECTED"]


def test_delay_and_its_deadline(broken: Broken) -> None:
    before = time.monotonic()
    assert broken.read(Faults(delay=0.05)) == ["OK", "OK"]
    assert time.monotonic() - before >= 0.05
    assert broken.read(Faults(delay=10), timeout=0.02) == ["TIMED_OUT", "TIMED_OUT"]
    assert time.monotonic() - before < 5


def test_dropped_reads_time_out_and_are_canceled_by_close(broken: Broken) -> None:
    assert broken.read(Faults(drop=True), timeout=0.02) == ["TIMED_OUT", "TIMED_OUT"]
    assert broken.read(Faults()) == ["PEER_LOST", "PEER_LOST"]
    broken.endpoint, broken.remote = broken.connect()
    closing = threading.Timer(0.02, broken.endpoint.close)
    closing.start()
    assert broken.read(Faults(drop=True)) == ["CANCELED", "CANCELED"]
    closing.join()


def test_the_peer_is_lost_after_so_many_reads(broken: Broken) -> None:
    faults = Faults(lose_peer_after=2)
    outcomes = [broken.read(faults)[0] for _ in range(4)]
    assert outcomes == ["OK", "OK", "PEER_LOST", "PEER_LOST"]


def test_corrupt_bytes_come_as_ok(broken: Broken) -> None:
    assert broken.read(Faults(corrupt=True)) == ["OK", "OK"]
    assert broken.pages() == [False, False]


def test_everything_is_rejected(broken: Broken) -> None:
    assert broken.read(Faults(reject=True)) == ["REJECTED", "REJECTED"]


def test_lies_about_words(broken: Broken) -> None:
    assert broken.read(Faults(unvalidated=True), word=4) == ["OK", "OK"]
    assert broken.read(Faults(words_too_early=True), word=4) == ["REJECTED", "REJECTED"]
    assert broken.read(Faults(words_too_early=True)) == ["OK", "OK"]
    assert broken.pages() == [True, True]


def test_connections_are_refused(broken: Broken) -> None:
    broken.transport.faults = Faults(refuse=True)
    with broken.owner.open() as other:
        with pytest.raises(TransportError, match="on purpose"):
            broken.transport.accept(other.describe())
        with broken.transport.open() as endpoint, pytest.raises(TransportError, match="on purpose"):
            endpoint.bind(other.describe())
