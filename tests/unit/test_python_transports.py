"""Transports in Python under the native peer layer: what they raise reaches the caller, and costs that call only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster import eventually
from p2pkv.transports.base import MemoryRegion, RemoteRegion, Spans, Statuses, Transfer, Words
from p2pkv.transports.faulty import FaultyEndpoint, FaultyTransport
from p2pkv.transports.native import TcpTransport
from pair import Pair


class BrokenTransport(FaultyTransport):
    """Has a bug wherever ``broken`` says: in ``open``, ``read``, ``wait`` or ``statuses``."""

    def __init__(self) -> None:
        super().__init__(TcpTransport())
        self.broken = ""
        self.opened: list[BrokenEndpoint] = []

    def open(self) -> BrokenEndpoint:
        if self.broken == "open":
            raise KeyError("a bug in open")
        self.opened.append(BrokenEndpoint(self))
        return self.opened[-1]


class BrokenEndpoint(FaultyEndpoint):
    transport: BrokenTransport

    def read(
        self, local: MemoryRegion, remote: RemoteRegion, spans: Spans, *, words: Words | None
    ) -> Transfer:
        assert words is not None
        assert spans.flags.c_contiguous
        assert words.shape == (len(spans), 2)
        if self.transport.broken == "read":
            raise KeyError("a bug in read")
        return BrokenTransfer(self.transport, super().read(local, remote, spans, words=words))


class BrokenTransfer(Transfer):
    def __init__(self, transport: BrokenTransport, inner: Transfer) -> None:
        self._transport = transport
        self._inner = inner

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, timeout: float) -> Statuses:
        if self._transport.broken == "wait":
            raise KeyError("a bug in wait")
        statuses = self._inner.wait(timeout)
        return np.append(statuses, np.uint8(0)) if self._transport.broken == "statuses" else statuses


@pytest.fixture
def broken() -> list[BrokenTransport]:
    return []


@pytest.fixture
def pair(tmp_path: Path, broken: list[BrokenTransport]) -> Iterator[Pair]:
    def extra() -> list[BrokenTransport]:
        broken.append(BrokenTransport())
        return [broken[-1]]

    pair = Pair(tmp_path, extra=extra, transports=["tcp"])  # type: ignore[arg-type]
    yield pair
    pair.close()


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        ("open", KeyError, "a bug in open"),
        ("read", KeyError, "a bug in read"),
        ("wait", KeyError, "a bug in wait"),
        ("statuses", ValueError, "the statuses of a transfer must be"),
    ],
)
def test_a_bug_in_a_transport_reaches_the_caller_and_ends_the_connection(
    pair: Pair, broken: list[BrokenTransport], where: str, error: type[Exception], words: str
) -> None:
    keys, readers = pair.publish(), broken[1]
    readers.broken = where
    with pytest.raises(error, match=words):
        pair.reader.fetch(keys, pair.destination)
    assert all(endpoint.closed.is_set() for endpoint in readers.opened)
    readers.broken = ""
    eventually(lambda: pair.fetch_is_right(keys), 5.0)
    assert {traffic.transport for traffic in pair.reader.peers()} == {"faulty"}


def test_a_connection_of_a_transport_in_python_is_kept_for_the_next_call(
    pair: Pair, broken: list[BrokenTransport]
) -> None:
    keys = pair.publish()
    for _ in range(3):
        assert pair.fetch_is_right(keys)
    assert len(broken[1].opened) == 1
    pair.reader.close()
    assert broken[1].opened[0].closed.is_set()
