"""The in-process transport: the reference implementation, in plain Python, for tests that want no sockets.

Slow on purpose: one lock per region, a copy in the caller's thread, and nothing hidden. It keeps every rule
of :mod:`p2pkv.transports.base`; read it first when writing a transport of your own.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
import time
import weakref
from collections.abc import Mapping

from p2pkv.errors import ClosedError, TransportError, UsageError
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
    screen_spans,
)
from p2pkv.transports.options import UNSET

_SLICE = 1 << 20
"""Bytes between two looks at the clock and at ``close``: about 0.1 ms."""

_ID_BYTES = 16
_ENDPOINT_TAG = b"p2pkv-local-endpoint-1"
_REGION_TAG = b"p2pkv-local-region-1"

_endpoints: weakref.WeakValueDictionary[bytes, LocalEndpoint] = weakref.WeakValueDictionary()
_regions: weakref.WeakValueDictionary[bytes, LocalMemoryRegion] = weakref.WeakValueDictionary()


def _parse(blob: bytes, tag: bytes) -> tuple[bytes, int]:
    if len(blob) != len(tag) + 8 + _ID_BYTES or not blob.startswith(tag):
        raise TransportError("handshake is not one of the local transport")
    return blob[-_ID_BYTES:], int.from_bytes(blob[len(tag) : -_ID_BYTES], "little")


class LocalMemoryRegion(MemoryRegion):
    """``lock`` is held while the memory is touched for a transfer: ``close`` returns after the last touch."""

    def __init__(self, buffer: object, address: int, nbytes: int, *, readable: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.lock = threading.Lock()
        self.is_closed = False
        self._buffer: object = buffer
        self._id = secrets.token_bytes(_ID_BYTES) if readable else b""
        if readable:
            _regions[self._id] = self

    def describe(self) -> bytes:
        if not self._id:
            raise TransportError("memory that was not registered readable has nothing to describe")
        return _REGION_TAG + self.nbytes.to_bytes(8, "little") + self._id

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            self._buffer = None


class LocalRemoteRegion(RemoteRegion):
    def __init__(self, region_id: bytes, nbytes: int, endpoint: LocalEndpoint) -> None:
        self.region_id = region_id
        self.nbytes = nbytes
        self.endpoint = endpoint


class LocalTransfer(Transfer):
    """Copies in the thread that waits. ``_turn`` makes it one thread at a time, and the rest its own."""

    def __init__(
        self,
        endpoint: LocalEndpoint,
        regions: tuple[LocalMemoryRegion, LocalRemoteRegion],
        batch: tuple[Spans, Words | None],
    ) -> None:
        self._endpoint = endpoint
        self._local, self._remote = regions
        self._spans, self._words = batch
        self._statuses = screen_spans(
            *batch, local_nbytes=self._local.nbytes, remote_nbytes=self._remote.nbytes
        )
        self._turn = threading.Lock()
        self._next = 0
        self._n_copied = 0
        self._outcome: Status | None = None
        self.is_settled = not bool((self._statuses == Status.PENDING).any())

    def done(self) -> bool:
        if self._turn.acquire(blocking=False):
            try:
                self._copy_slice()
            finally:
                self._turn.release()
        return self.is_settled

    def wait(self, timeout: float) -> Statuses:
        deadline = time.monotonic() + timeout
        if not self._turn.acquire(timeout=max(timeout, 0)):
            self.abort(Status.TIMED_OUT)
            self._turn.acquire()
        try:
            while not self.is_settled:
                if time.monotonic() >= deadline:
                    self.abort(Status.TIMED_OUT)
                self._copy_slice()
        finally:
            self._turn.release()
        statuses: Statuses = self._statuses.copy()
        return statuses

    def abort(self, reason: Status) -> None:
        """Settle what is pending as ``reason``, soon: the thread that copies sees to it."""
        if self._outcome is None and not self.is_settled:
            self._outcome = reason
            self._endpoint.is_dead = True

    def settle(self, reason: Status) -> None:
        """Settle what is pending as ``reason`` and return when the local memory is out of use."""
        if not self.is_settled:
            self.abort(reason)
            with self._turn:
                self._copy_slice()

    def _copy_slice(self) -> None:
        if self.is_settled:
            return
        owner = _regions.get(self._remote.region_id)
        if not self._endpoint.is_peer_alive():
            self.abort(Status.PEER_LOST)
        if self._local.is_closed:
            self.abort(Status.CANCELED)
        if self._outcome is not None or owner is None or owner.is_closed:
            reason = Status.REJECTED if self._outcome is None else self._outcome
            self._statuses[self._statuses == Status.PENDING] = reason
            self.is_settled = True
        else:
            self._advance(owner)

    def _advance(self, owner: LocalMemoryRegion) -> None:
        while self._next < len(self._spans) and self._statuses[self._next] != Status.PENDING:
            self._next += 1
        if self._next == len(self._spans):
            self.is_settled = True
            return
        local, remote, length = (int(value) for value in self._spans[self._next])
        nbytes = min(length - self._n_copied, _SLICE)
        with self._local.lock, owner.lock:
            if self._local.is_closed or owner.is_closed:
                return
            ctypes.memmove(
                self._local.address + local + self._n_copied, owner.address + remote + self._n_copied, nbytes
            )
            self._n_copied += nbytes
            if self._n_copied == length:
                # after the last byte: a word that still stands then vouches for all of them
                is_good = self._is_word_as_expected(owner)
                self._statuses[self._next] = Status.OK if is_good else Status.REJECTED
                self._next += 1
                self._n_copied = 0

    def _is_word_as_expected(self, owner: LocalMemoryRegion) -> bool:
        if self._words is None or self._words[self._next, 0] == NO_WORD:
            return True
        offset, value = (int(part) for part in self._words[self._next])
        return ctypes.c_uint64.from_address(owner.address + offset).value == value


class LocalEndpoint(Endpoint):
    def __init__(self, transport: LocalTransport) -> None:
        self._transport = transport
        self._id = secrets.token_bytes(_ID_BYTES)
        self._peer_id = b""
        self._active: LocalTransfer | None = None
        self._lock = threading.Lock()  # guards _active and is_closed
        self.is_closed = False
        self.is_dead = False
        _endpoints[self._id] = self

    def is_peer_alive(self) -> bool:
        peer = _endpoints.get(self._peer_id)
        return peer is not None and not peer.is_closed

    def describe(self) -> bytes:
        return _ENDPOINT_TAG + bytes(8) + self._id

    def bind(self, remote: bytes) -> None:
        peer_id, _ = _parse(remote, _ENDPOINT_TAG)
        if self._peer_id:
            raise TransportError("the endpoint is bound already")
        self._peer_id = peer_id

    def attach(self, region: bytes) -> LocalRemoteRegion:
        return LocalRemoteRegion(*_parse(region, _REGION_TAG), self)

    def read(
        self, local: MemoryRegion, remote: RemoteRegion, spans: Spans, *, words: Words | None
    ) -> LocalTransfer:
        if not isinstance(local, LocalMemoryRegion):
            raise UsageError("the local region is not registered with this transport")
        if not isinstance(remote, LocalRemoteRegion) or remote.endpoint is not self:
            raise UsageError("the remote region is not attached to this endpoint")
        transfer = LocalTransfer(self, (local, remote), check_batch(spans, words))
        with self._lock:
            is_busy = self._active is not None and not self._active.is_settled
            if not (self.is_closed or self.is_dead or is_busy):
                self._active = transfer
                return transfer
        transfer.settle(Status.CANCELED if self.is_closed or is_busy else Status.PEER_LOST)
        return transfer

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            active = self._active
        if active is not None:
            active.settle(Status.CANCELED)


class LocalTransport(Transport):
    name = "local"
    domain = f"local:{os.getpid()}:{secrets.token_hex(8)}"

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._endpoints: weakref.WeakSet[LocalEndpoint] = weakref.WeakSet()
        self._accepted: dict[bytes, LocalEndpoint] = {}
        self._memory: weakref.WeakSet[LocalMemoryRegion] = weakref.WeakSet()
        self._is_closed = False

    @classmethod
    def unavailable(cls, options: Mapping[str, object] = UNSET) -> str | None:
        return None

    def register_memory(
        self, buffer: object, address: int, nbytes: int, *, readable: bool
    ) -> LocalMemoryRegion:
        region = LocalMemoryRegion(buffer, address, nbytes, readable=readable)
        with self._lock:
            if self._is_closed:
                raise TransportError(f"cannot register {nbytes} bytes: the local transport is closed")
            self._memory.add(region)
        return region

    def open(self) -> LocalEndpoint:
        endpoint = LocalEndpoint(self)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the local transport is closed")
            self._endpoints.add(endpoint)
        return endpoint

    def accept(self, remote: bytes) -> bytes:
        peer_id, _ = _parse(remote, _ENDPOINT_TAG)
        endpoint = self.open()
        endpoint.bind(remote)
        with self._lock:
            gone = [peer for peer, kept in self._accepted.items() if not kept.is_peer_alive()]
            for peer in gone:
                del self._accepted[peer]
            self._accepted[peer_id] = endpoint
        return endpoint.describe()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            children = [*self._endpoints, *self._accepted.values(), *self._memory]
        for child in children:
            child.close()
