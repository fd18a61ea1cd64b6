"""A transport that wraps another and breaks it on purpose, as :class:`Faults` says.

For tests of what stands on transports, and for tests of the tests: ``words_too_early`` and ``unvalidated``
are transports that lie, and a suite that does not find them out proves nothing.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from p2pkv.errors import TransportError
from p2pkv.transports.base import (
    NO_WORD,
    Endpoint,
    MemoryRegion,
    RemoteRegion,
    Spans,
    Status,
    Statuses,
    Transfer,
    Transport,
    Words,
    check_batch,
)
from p2pkv.transports.options import UNSET


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. Nothing, by default."""

    delay: float = 0.0
    """Seconds that pass before a transfer makes progress."""
    drop: bool = False
    """Transfers never settle by themselves: they time out, or are canceled."""
    lose_peer_after: int | None = None
    """After this many reads of an endpoint, its peer is lost."""
    corrupt: bool = False
    """One byte of every span that is OK is flipped."""
    reject: bool = False
    """Every span that would be OK is REJECTED."""
    refuse: bool = False
    """Peers can't connect: ``accept`` and ``bind`` raise TransportError."""
    words_too_early: bool = False
    """A lie: words are read before the bytes they vouch for."""
    unvalidated: bool = False
    """A lie: spans are OK whatever their word says."""


class FaultyTransport(Transport):
    """``inner``, broken as ``faults`` says, which may change at any time. Closing it closes ``inner``."""

    name = "faulty"

    def __init__(self, inner: Transport, faults: Faults | None = None) -> None:
        self.inner = inner
        self.faults = faults or Faults()
        self.domain = inner.domain

    @classmethod
    def unavailable(cls, options: Mapping[str, object] = UNSET) -> str | None:
        return None

    def register_memory(self, buffer: object, address: int, nbytes: int, *, readable: bool) -> MemoryRegion:
        return self.inner.register_memory(buffer, address, nbytes, readable=readable)

    def open(self) -> FaultyEndpoint:
        return FaultyEndpoint(self)

    def accept(self, remote: bytes) -> bytes:
        if self.faults.refuse:
            raise TransportError("cannot accept the peer: refused on purpose")
        return self.inner.accept(remote)

    def close(self) -> None:
        self.inner.close()

    @property
    def native(self) -> Any | None:
        """None if accepting is to be refused: the native object would not ask."""
        return None if self.faults.refuse else self.inner.native


class FaultyEndpoint(Endpoint):
    def __init__(self, transport: FaultyTransport) -> None:
        self.transport = transport
        self.inner = transport.inner.open()
        self.closed = threading.Event()
        self.is_dead = False
        self._n_reads = 0

    def describe(self) -> bytes:
        return self.inner.describe()

    def bind(self, remote: bytes) -> None:
        if self.transport.faults.refuse:
            raise TransportError("cannot bind to the peer: refused on purpose")
        self.inner.bind(remote)

    def attach(self, region: bytes) -> RemoteRegion:
        return self.inner.attach(region)

    def read(
        self, local: MemoryRegion, remote: RemoteRegion, spans: Spans, *, words: Words | None
    ) -> Transfer:
        spans, words = check_batch(spans, words)
        faults = self.transport.faults
        self._n_reads += 1
        if faults.lose_peer_after is not None and self._n_reads > faults.lose_peer_after:
            self.is_dead = True
        if self.closed.is_set() or self.is_dead:
            return _Unsettled(self, len(spans), Status.CANCELED if self.closed.is_set() else Status.PEER_LOST)
        if faults.drop:
            return _Unsettled(self, len(spans), None)
        if faults.words_too_early and words is not None:
            return _TooEarly(self, (local, remote), (spans, words))
        inner = self.inner.read(local, remote, spans, words=None if faults.unvalidated else words)
        return _Spoiled(self, inner, local, spans)

    def close(self) -> None:
        self.closed.set()
        self.inner.close()


class _Unsettled(Transfer):
    """Nothing was posted: pending until the time-out, or settled as ``outcome`` from the start."""

    def __init__(self, endpoint: FaultyEndpoint, n_spans: int, outcome: Status | None) -> None:
        self._endpoint = endpoint
        self._n_spans = n_spans
        self._outcome = outcome

    def done(self) -> bool:
        if self._outcome is None and self._endpoint.closed.is_set():
            self._outcome = Status.CANCELED
        return self._outcome is not None

    def wait(self, timeout: float) -> Statuses:
        if self._outcome is None:
            was_closed = self._endpoint.closed.wait(max(timeout, 0))
            self._outcome = Status.CANCELED if was_closed else Status.TIMED_OUT
            self._endpoint.is_dead = True
        return np.full(self._n_spans, self._outcome, np.uint8)


class _Spoiled(Transfer):
    """The inner transfer, late and with its outcome spoiled. Spoils once, however often it is waited for."""

    def __init__(self, endpoint: FaultyEndpoint, inner: Transfer, local: MemoryRegion, spans: Spans) -> None:
        self._endpoint = endpoint
        self._faults = endpoint.transport.faults
        self._inner = inner
        self._local = local
        self._spans = spans
        self._ready_at = time.monotonic() + self._faults.delay
        self._statuses: Statuses | None = None

    def done(self) -> bool:
        return time.monotonic() >= self._ready_at and self._inner.done()

    def wait(self, timeout: float) -> Statuses:
        if self._statuses is None:
            deadline = time.monotonic() + timeout
            self._endpoint.closed.wait(max(min(self._ready_at, deadline) - time.monotonic(), 0))
            self._statuses = self._spoil(self._inner.wait(max(deadline - time.monotonic(), 0)))
        copy: Statuses = self._statuses.copy()
        return copy

    def _spoil(self, statuses: Statuses) -> Statuses:
        good = np.flatnonzero(statuses == Status.OK)
        if self._faults.corrupt:
            for local, length in self._spans[good][:, [0, 2]].tolist():
                if length > 0:
                    at = ctypes.c_uint8.from_address(self._local.address + local + length // 2)
                    at.value ^= 0xFF
        if self._faults.reject:
            statuses[good] = Status.REJECTED
        return statuses


class _TooEarly(Transfer):
    """Reads all words, then all bytes, and believes that this proves something."""

    def __init__(
        self,
        endpoint: FaultyEndpoint,
        regions: tuple[MemoryRegion, RemoteRegion],
        batch: tuple[Spans, Words],
    ) -> None:
        self._endpoint = endpoint
        self._local, self._remote = regions
        self._spans, self._words = batch
        self._seen = np.zeros(len(self._spans), np.uint64)
        self._scratch = endpoint.transport.register_memory(
            self._seen, self._seen.ctypes.data, max(self._seen.nbytes, 1), readable=False
        )
        self._words_read = self._read_words()
        self._bytes_read: Transfer | None = None
        self._statuses: Statuses | None = None

    def done(self) -> bool:
        if self._statuses is not None:
            return True
        if self._bytes_read is None:
            if not self._words_read.done():
                return False
            self._read_bytes(0)
        return self._bytes_read is not None and self._bytes_read.done()

    def wait(self, timeout: float) -> Statuses:
        if self._statuses is None:
            deadline = time.monotonic() + timeout
            bytes_read = self._bytes_read or self._read_bytes(timeout)
            statuses = bytes_read.wait(max(deadline - time.monotonic(), 0)).copy()
            is_stale = (self._words[:, 0] != NO_WORD) & (self._seen != self._words[:, 1])
            statuses[is_stale & (statuses == Status.OK)] = Status.REJECTED
            self._statuses = statuses
            self._scratch.close()
        copy: Statuses = self._statuses.copy()
        return copy

    def _read_words(self) -> Transfer:
        (asked,) = np.nonzero(self._words[:, 0] != NO_WORD)
        spans = np.empty((len(asked), 3), np.int64)
        spans[:, 0] = asked * 8
        spans[:, 1] = self._words[asked, 0].astype(np.int64)
        spans[:, 2] = 8
        return self._endpoint.inner.read(self._scratch, self._remote, spans, words=None)

    def _read_bytes(self, timeout: float) -> Transfer:
        self._words_read.wait(timeout)
        self._bytes_read = self._endpoint.inner.read(self._local, self._remote, self._spans, words=None)
        return self._bytes_read
