"""The transport: what a node starts, registers memory with, and opens endpoints of."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from p2pkv.errors import ClosedError, ConfigError, TransportError
from p2pkv.transports.base import Transport, TransportSettings
from p2pkv.transports.options import UNSET, TransportOptions
from p2pkv_toy.memory import ToyMemoryRegion
from p2pkv_toy.owner import Owner
from p2pkv_toy.reader import ToyEndpoint

_MAX_EXPECTED = 1024
"""Readers that were accepted and have not come; for one more the oldest is not expected any longer."""


@dataclass(frozen=True, slots=True)
class ToyOptions(TransportOptions):
    port: int = 0
    """The port that readers connect to; 0 takes a free one."""
    piece: int = 256 * 1024
    """How many bytes an owner copies and sends at a time."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be 0 to 65535, not {self.port}")
        if not 4096 <= self.piece <= 1 << 24:
            raise ConfigError(f"piece must be 4096 to {1 << 24} bytes, not {self.piece}")


class ToyTransport(Transport):
    """Any IPv4 network, by plain sockets and threads. Bytes are not encrypted: a token alone proves who may read."""

    name = "toy"
    domain = "toy"
    options_class = ToyOptions

    def __init__(
        self, host: str = "127.0.0.1", *, advertise: str = "", options: ToyOptions | None = None
    ) -> None:
        options = options or ToyOptions()
        self._host = advertise or host
        self._lock = threading.Lock()  # guards all below
        self._regions: dict[int, ToyMemoryRegion] = {}
        self._endpoints: set[ToyEndpoint] = set()
        self._expected: dict[ToyEndpoint, None] = {}
        self._is_closed = False
        try:
            ipaddress.IPv4Address(self._host)
            self._owner = Owner(host, options.port, piece_nbytes=options.piece, find=self._find)
        except (OSError, ValueError, RuntimeError) as error:
            raise TransportError(
                f"cannot start the toy transport on {host}:{options.port}: {error}"
            ) from error

    @classmethod
    def unavailable(cls, options: Mapping[str, object] = UNSET) -> str | None:
        return None

    @classmethod
    def create(cls, settings: TransportSettings) -> ToyTransport:
        options = settings.options_of(cls.name, ToyOptions)
        return cls(settings.host, advertise=settings.advertise, options=options)

    def register_memory(
        self, buffer: object, address: int, nbytes: int, *, readable: bool
    ) -> ToyMemoryRegion:
        region = ToyMemoryRegion(buffer, address, nbytes, readable=readable, forget=self._forget_region)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the toy transport is closed")
            self._regions[region.id] = region
        return region

    def open(self) -> ToyEndpoint:
        endpoint = ToyEndpoint(self._host, self._owner.port, self._owner.grant, self._forget_endpoint)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the toy transport is closed")
            self._endpoints.add(endpoint)
        return endpoint

    def accept(self, remote: bytes) -> bytes:
        endpoint = self.open()
        try:
            endpoint.bind(remote)
        except TransportError:
            endpoint.close()
            raise
        endpoint.grant.on_left = endpoint.close
        with self._lock:
            self._expected = {e: None for e in self._expected if e.is_expecting} | {endpoint: None}
            excess = list(self._expected)[: max(len(self._expected) - _MAX_EXPECTED, 0)]
        for forgotten in excess:
            forgotten.close()
        return endpoint.describe()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            children = [*self._endpoints, *self._regions.values()]
        self._owner.close()
        for child in children:
            child.close()

    def _find(self, region_id: int) -> ToyMemoryRegion | None:
        with self._lock:
            region = self._regions.get(region_id)
        return region if region is not None and region.is_readable else None

    def _forget_region(self, region: ToyMemoryRegion) -> None:
        with self._lock:
            self._regions.pop(region.id, None)

    def _forget_endpoint(self, endpoint: ToyEndpoint) -> None:
        with self._lock:
            self._endpoints.discard(endpoint)
            self._expected.pop(endpoint, None)
