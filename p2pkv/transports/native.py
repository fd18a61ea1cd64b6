"""The transports of the native core, shm and tcp, behind the interface of :mod:`p2pkv.transports.base`.

Only arguments and errors are looked at here; promises are kept in ``native/src/transports``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from p2pkv import _native
from p2pkv.errors import ClosedError, ConfigError, TransportError, UsageError
from p2pkv.transports.base import (
    Endpoint,
    FdBacked,
    MemoryRegion,
    RailTotals,
    Remark,
    RemoteRegion,
    Spans,
    Statuses,
    Transfer,
    Transport,
    TransportSettings,
    Words,
    check_batch,
)
from p2pkv.transports.options import UNSET, TransportOptions

_MAX_STREAMS = 8
"""``kMaxStreams`` of the native core: so many tokens a handshake has room for."""
_MAX_RAILS = 8
"""``kMostRails`` of the native core."""


class NativeMemoryRegion(MemoryRegion):
    """Keeps the buffer alive for as long as native threads may touch it."""

    def __init__(self, native: _native.MemoryRegion, buffer: object) -> None:
        self.native = native
        self.address = native.address
        self.nbytes = native.nbytes
        self._buffer: object = buffer

    def describe(self) -> bytes:
        blob = self.native.describe()
        if not blob:
            raise TransportError("memory that was not registered readable has nothing to describe")
        return blob

    def close(self) -> None:
        self.native.close()
        self._buffer = None


class NativeRemoteRegion(RemoteRegion):
    def __init__(self, native: _native.RemoteRegion, endpoint: NativeEndpoint) -> None:
        self.native = native
        self.nbytes = native.nbytes
        self.endpoint = endpoint


class NativeTransfer(Transfer):
    def __init__(self, native: _native.Transfer, local: NativeMemoryRegion) -> None:
        self._native = native
        self._local = local  # and through it the buffer that is written to

    def done(self) -> bool:
        return self._native.done()

    def advance(self, timeout: float) -> bool:
        return self._native.advance(timeout)

    def wait(self, timeout: float) -> Statuses:
        return self._native.wait(timeout)


class NativeEndpoint(Endpoint):
    def __init__(self, native: _native.Endpoint) -> None:
        self.native = native

    def describe(self) -> bytes:
        try:
            blob = self.native.describe()
        except RuntimeError as error:
            raise TransportError(f"cannot open an endpoint: {error}") from error
        if not blob:
            raise ClosedError("the endpoint is closed")
        return blob

    def bind(self, remote: bytes) -> None:
        try:
            self.native.bind(remote)
        except RuntimeError as error:
            raise TransportError(f"cannot bind to the peer: {error}") from error

    def attach(self, region: bytes) -> NativeRemoteRegion:
        try:
            return NativeRemoteRegion(self.native.attach(region), self)
        except RuntimeError as error:
            raise TransportError(f"cannot attach the peer's region: {error}") from error

    def read(
        self, local: MemoryRegion, remote: RemoteRegion, spans: Spans, *, words: Words | None
    ) -> NativeTransfer:
        if not isinstance(local, NativeMemoryRegion):
            raise UsageError("the local region is not registered with this transport")
        if not isinstance(remote, NativeRemoteRegion) or remote.endpoint is not self:
            raise UsageError("the remote region is not attached to this endpoint")
        spans, words = check_batch(spans, words)
        return NativeTransfer(self.native.read(local.native, remote.native, spans, words), local)

    def close(self) -> None:
        self.native.close()


class NativeTransport(Transport):
    """What the transports of the native core have in common on this side: everything but how they start."""

    def __init__(self, native: _native.Transport) -> None:
        self._native = native
        self._is_closed = False
        self.domain = native.domain

    def register_memory(
        self, buffer: object, address: int, nbytes: int, *, readable: bool
    ) -> NativeMemoryRegion:
        fd = buffer.fd if isinstance(buffer, FdBacked) else -1
        try:
            return NativeMemoryRegion(self._native.register_memory(address, nbytes, fd, readable), buffer)
        except RuntimeError as error:
            raise TransportError(f"cannot register {nbytes} bytes at {address:#x}: {error}") from error

    def open(self) -> NativeEndpoint:
        if self._is_closed:
            raise ClosedError(f"the {self.name} transport is closed")
        return NativeEndpoint(self._native.open())

    def accept(self, remote: bytes) -> bytes:
        if self._is_closed:
            raise ClosedError(f"the {self.name} transport is closed")
        try:
            return self._native.accept(remote)
        except RuntimeError as error:
            raise TransportError(f"cannot accept the peer: {error}") from error

    def rail_totals(self) -> Sequence[RailTotals]:
        return [
            RailTotals(
                rail.n_bytes,
                {"broken": rail.n_broken, "silent": rail.n_silent, "late": rail.n_late},
                rail.n_retried_bytes,
            )
            for rail in self._native.rail_totals()
        ]

    def n_forged(self) -> int:
        return self._native.n_forged()

    def close(self) -> None:
        self._is_closed = True
        self._native.close()

    @property
    def native(self) -> _native.Transport:
        return self._native


class ShmTransport(NativeTransport):
    """Processes of one host and user map each other's sealed memory. Readable memory must be fd-backed."""

    name = "shm"

    def __init__(self) -> None:
        try:
            super().__init__(_native.shm_transport())
        except RuntimeError as error:
            raise TransportError(f"cannot start the shm transport: {error}") from error

    @classmethod
    def unavailable(cls, options: Mapping[str, object] = UNSET) -> str | None:
        if sys.platform != "linux":
            return f"shm needs Linux, this is {sys.platform}"
        try:
            # The smallest region shows whether memfds and their seals are there; containers may forbid them.
            _native.SharedRegion.create(os.sysconf("SC_PAGESIZE"))
        except OSError as error:
            return f"shm needs sealed shared memory: {error}"
        return None


@dataclass(frozen=True, slots=True)
class TcpOptions(TransportOptions):
    port: int = 0
    """The port that peers read from; 0 takes a free one, of the setting ``data_ports`` if there is one."""
    streams: int = 0
    """Over how many connections an endpoint reads on each rail, 1 to 8; 0: as many as pay, which is measured."""
    addresses: tuple[str, ...] = ()
    """The rails' ends: addresses of this host, or its interfaces; none: the address that peers are told of the node."""
    encrypt: bool = False
    """Encrypt what goes over connections, with AES-256-GCM of OpenSSL's libcrypto; the setting ``encrypt`` sets it."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be 0 to 65535, not {self.port}")
        if not 0 <= self.streams <= _MAX_STREAMS:
            raise ConfigError(
                f"streams must be 1 to {_MAX_STREAMS}, or 0 for as many as pay, not {self.streams}"
            )
        if len(self.addresses) > _MAX_RAILS:
            raise ConfigError(f"addresses must be {_MAX_RAILS} at most, not {len(self.addresses)}")
        if twice := [name for name in self.addresses if self.addresses.count(name) > 1]:
            raise ConfigError(f"addresses must differ, {twice[0]} is there twice")


class TcpTransport(NativeTransport):
    """Any network.

    Listens on ``host`` and ``port``, or without one on the first free one of ``ports``; see :class:`TcpOptions`.
    ``advertise`` is what peers connect to, needed if ``host`` is a wildcard. If there are ``addresses``, it listens
    at those instead: each is the end of a rail. One that encrypts, and one that doesn't, refuse each other.
    """

    name = "tcp"
    options_class = TcpOptions

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        port: int = 0,
        ports: tuple[int, int] = (0, 0),
        streams: int = 0,
        advertise: str = "",
        addresses: Sequence[str] = (),
        encrypt: bool = False,
    ) -> None:
        try:
            native = _native.tcp_transport(
                host, (port, port) if port else ports, streams, advertise, list(addresses), encrypt
            )
        except RuntimeError as error:
            raise TransportError(f"cannot start the tcp transport: {error}") from error
        super().__init__(native)
        self.port = native.port

    @classmethod
    def create(cls, settings: TransportSettings) -> TcpTransport:
        options = settings.options_of(cls.name, TcpOptions)
        return cls(
            settings.host,
            port=options.port,
            ports=settings.ports,
            streams=options.streams,
            advertise=settings.advertise,
            addresses=options.addresses,
            encrypt=options.encrypt,
        )

    @classmethod
    def unavailable(cls, options: Mapping[str, object] = UNSET) -> str | None:
        if not TcpOptions.parse(cls.name, options).encrypt:
            return None
        missing = _native.encryption_missing()
        return f"tcp can't be encrypted: {missing}" if missing else None

    @classmethod
    def remarks(cls, settings: TransportSettings) -> Iterator[Remark]:
        """Tell whether pages are encrypted, and by which library."""
        if not settings.options_of(cls.name, TcpOptions).encrypt:
            return
        missing = _native.encryption_missing()
        if not missing:
            yield Remark("encryption", f"pages over tcp are encrypted, by {_native.encryption_library()}")


def native_ways(transports: Sequence[Transport]) -> list[tuple[str, _native.Transport]]:
    """Return name and native object of the transports that transfers can use: those that need no interpreter."""
    return [(t.name, t.native) for t in transports if isinstance(t, NativeTransport)]


def for_core(endpoint: Endpoint, remote: RemoteRegion) -> tuple[object, object]:
    """Return a connection as the core reads over it: its own objects, or those of a transport in Python as they are."""
    if isinstance(endpoint, NativeEndpoint) and isinstance(remote, NativeRemoteRegion):
        return endpoint.native, remote.native
    return endpoint, remote


def region_for_core(transport: Transport, region: MemoryRegion) -> object:
    """Return local memory as the core reads into it over ``transport``, which may be one in Python."""
    if isinstance(transport, NativeTransport) and isinstance(region, NativeMemoryRegion):
        return region.native
    return region
