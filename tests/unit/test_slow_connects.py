"""A peer that takes longer to connect to than a call has time is reached all the same, by later calls."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from cluster import eventually
from p2pkv.transports.base import MemoryRegion, RemoteRegion, Spans, Status, Statuses, Transfer, Words
from p2pkv.transports.faulty import FaultyEndpoint, FaultyTransport
from p2pkv.transports.native import TcpTransport
from pair import Pair

CONNECTING_S = 1.5
CALL_S = 0.3


class SlowTransport(FaultyTransport):
    """Whose connections carry nothing for a while."""

    def __init__(self) -> None:
        super().__init__(TcpTransport())

    def open(self) -> SlowEndpoint:
        return SlowEndpoint(self)


class SlowEndpoint(FaultyEndpoint):
    def __init__(self, transport: SlowTransport) -> None:
        super().__init__(transport)
        self.ready_at = time.monotonic() + CONNECTING_S

    def read(
        self, local: MemoryRegion, remote: RemoteRegion, spans: Spans, *, words: Words | None
    ) -> Transfer:
        return SlowTransfer(self, super().read(local, remote, spans, words=words), len(spans))


class SlowTransfer(Transfer):
    def __init__(self, endpoint: SlowEndpoint, inner: Transfer, n_spans: int) -> None:
        self._endpoint = endpoint
        self._inner = inner
        self._n_spans = n_spans

    def done(self) -> bool:
        return time.monotonic() >= self._endpoint.ready_at and self._inner.done()

    def wait(self, timeout: float) -> Statuses:
        missing = self._endpoint.ready_at - time.monotonic()
        if self._endpoint.closed.wait(max(0.0, min(missing, timeout))):
            return np.full(self._n_spans, Status.CANCELED, np.uint8)
        if missing > timeout:
            self._endpoint.close()
            return np.full(self._n_spans, Status.TIMED_OUT, np.uint8)
        return self._inner.wait(timeout - max(0.0, missing))


def test_a_peer_that_is_slow_to_connect_to_is_read_by_later_calls(tmp_path: Path) -> None:
    pair = Pair(tmp_path, extra=lambda: [SlowTransport()], transports=["tcp"])
    try:
        keys = pair.publish()
        assert not pair.reader.fetch(keys, pair.destination, timeout=CALL_S).any()
        eventually(lambda: pair.reader.fetch(keys, pair.destination, timeout=CALL_S).all(), 10.0)
        assert (pair.destination == pair.source).all()
    finally:
        pair.close()
