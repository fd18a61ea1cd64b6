"""What a node has registered of its own memory: with every transport, and with the offers.

The one table of it; docs/architecture.md, Registered memory, has what is made from it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from p2pkv import _native
from p2pkv.errors import DeviceError, TransportError
from p2pkv.memory.registered import Memory, MemoryTable
from p2pkv.transports.base import MemoryRegion, Resource, Transport
from p2pkv.transports.native import NativeMemoryRegion, native_ways

_log = logging.getLogger(__name__)


class Registrations(Resource):
    """Thread-safe. ``table`` is what is registered now."""

    def __init__(
        self,
        transports: Sequence[Transport],
        offers: _native.Transfers | None = None,
        *,
        count_refused: Callable[[str], None] = lambda transport: None,
    ) -> None:
        """``offers`` hear of what is registered; their ways are :func:`native_ways` of ``transports``.

        ``count_refused`` is told of the name of a transport that reads devices and can't have some device memory.
        """
        self._transports = {transport.name: transport for transport in transports}
        self._offers = offers
        self._count_refused = count_refused
        self._ways = [name for name, _ in native_ways(transports)]
        # guards the replacing of the table; reentrant, since a signal's handler may close the node wherever a thread is
        self._lock = threading.RLock()
        self.table = self.table_of()

    def add(
        self,
        buffer: object,
        address: int,
        nbytes: int,
        *,
        is_writable: bool = True,
        is_readable: bool = False,
    ) -> Memory:
        """Make local memory usable for calls; ``buffer`` is kept alive until it is closed.

        ``is_readable``: peers may read it, over every transport that can let them. Raises
        :class:`~p2pkv.errors.TransportError` naming the transport that can't use it.
        """
        regions, described = self._register(buffer, address, nbytes, is_writable, is_readable)
        memory = Memory(address, nbytes, regions, is_writable=is_writable, forget=self._forget)
        self._list(memory)
        self._tell_offers(memory, described)
        return memory

    def add_device(
        self,
        buffer: object,
        address: int,
        nbytes: int,
        *,
        device: _native.CudaDevice,
        is_writable: bool,
        is_readable: bool = False,
    ) -> Memory:
        """Make memory of a CUDA device known to calls; ``buffer`` is kept alive until it is closed.

        ``is_readable``: rows of it may be offered. Transports that read devices get to know it; if one of them can't
        have it, that is logged and counted, and over it rows are staged. Raises :class:`~p2pkv.errors.DeviceError` if
        there is no staging to be had for them.
        """
        memory = Memory(
            address,
            nbytes,
            {},
            is_writable=is_writable,
            forget=self._forget,
            buffer=buffer,
            device=device.ordinal,
        )
        if self._offers is not None:
            try:
                memory.row_memory, refusals = self._offers.add_device_memory(
                    address, nbytes, is_readable, is_writable, device
                )
            except RuntimeError as error:
                raise DeviceError(f"cannot stage rows in device memory: {error}") from error
            for transport, reason in refusals:
                self._count_refused(transport)
                _log.warning(
                    "rows of %d bytes of device memory at %#x are staged over %s: %s",
                    nbytes,
                    address,
                    transport,
                    reason,
                )
        self._list(memory)
        return memory

    def add_unlisted(self, buffer: object, address: int, nbytes: int) -> Memory:
        """Make local memory usable for reads, but not found by its address: it is for the node's own use.

        Raises as :meth:`add`. :meth:`close` leaves it open.
        """
        regions, _ = self._register(buffer, address, nbytes, True, False)
        return Memory(address, nbytes, regions, is_writable=True, forget=lambda memory: None, buffer=buffer)

    def table_of(self, memories: Iterable[Memory] = ()) -> MemoryTable:
        """Return a table of these memories alone."""
        return MemoryTable(memories, list(self._transports.values()))

    def _list(self, memory: Memory) -> None:
        with self._lock:
            self.table = self.table_of([*self.table.memories, memory])

    def _register(
        self, buffer: object, address: int, nbytes: int, is_writable: bool, is_readable: bool
    ) -> tuple[dict[str, MemoryRegion], dict[str, bytes]]:
        """Return the regions of every transport that can use the memory, and what peers are told of them."""
        regions: dict[str, MemoryRegion] = {}
        described: dict[str, bytes] = {}
        problems: list[str] = []
        try:
            for name, transport in self._transports.items():
                if is_readable and name in self._ways:
                    try:
                        regions[name] = transport.register_memory(buffer, address, nbytes, readable=True)
                        described[name] = regions[name].describe()
                    except TransportError as error:
                        problems.append(f"{name}: {error}")
                # Nothing is ever read into what is not writable, and a device could not have it: it would be refused.
                if is_writable and name not in regions:
                    regions[name] = transport.register_memory(buffer, address, nbytes, readable=False)
            if is_readable and not described:
                reasons = "; ".join(problems) or "none of the native core is in use"
                raise TransportError(f"no transport can let peers read this memory: {reasons}")
        except TransportError:
            for region in regions.values():
                region.close()
            raise
        return regions, described

    def _tell_offers(self, memory: Memory, described: dict[str, bytes]) -> None:
        if self._offers is None:
            return
        registrations = []
        for way, name in enumerate(self._ways):
            region = memory.regions.get(name)
            if isinstance(region, NativeMemoryRegion):
                registrations.append((way, region.native, described.get(name, b"")))
        memory.row_memory = self._offers.add_memory(
            memory.address, memory.nbytes, memory.is_writable, len(self._ways), registrations
        )

    def _forget(self, memory: Memory) -> None:
        with self._lock:
            self.table = self.table_of(m for m in self.table.memories if m is not memory)
        if self._offers is not None and memory.row_memory is not None:
            self._offers.remove_memory(memory.row_memory)

    def close(self) -> None:
        """Close every registration that is listed. Idempotent; the transports stay the caller's."""
        with self._lock:
            # at once: a table for each that goes would be work that grows with the square of their number
            memories, self.table = self.table.memories, self.table_of()
        for memory in memories:
            memory.close()
