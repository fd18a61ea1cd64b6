"""Registered local memory: what calls of the cache and of transfers may read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from p2pkv import _native
from p2pkv.lifetime import Origin
from p2pkv.transports.base import MemoryRegion, Resource, Transport
from p2pkv.transports.native import region_for_core


class Memory(Resource):
    """Registered local memory, usable over every transport. Keeps its buffer alive until closed.

    Memory of a device has no ``regions``: its bytes go through staging (``staging.py``).
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        regions: dict[str, MemoryRegion],
        *,
        is_writable: bool,
        forget: Callable[[Memory], None],
        buffer: object = None,
        device: int | None = None,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.is_writable = is_writable
        self.regions = regions
        self.device = device
        self.row_memory: int | None = None
        """Its number in the native ``RowMemories``, where offers and grants find it; None: they don't."""
        self._forget = forget
        self._buffer = buffer
        self._on_close: Callable[[], None] | None = None
        self._is_closed = False
        self._origin = Origin()

    def on_close(self, also: Callable[[], None]) -> None:
        """Have ``also`` called once, when this is closed; at once if it was."""
        self._on_close = also
        if self._is_closed:
            self._call_on_close()

    def close(self) -> None:
        """Unregister; in a forked child nothing, for there it is the parent's.

        Calls under way with this memory must have returned.
        """
        if not self._origin.is_here:
            return
        self._forget(self)
        self._is_closed = True
        self._call_on_close()
        for region in self.regions.values():
            region.close()
        self._buffer = None

    def _call_on_close(self) -> None:
        also, self._on_close = self._on_close, None
        if also is not None:
            also()


class MemoryTable:
    """What is registered at one moment, by address. Never changes: a call uses one from beginning to end.

    ``native`` is for reads: each memory's regions with ``transports``, in the order of preference. The table keeps the
    buffers alive, not ``native``.
    """

    def __init__(self, memories: Iterable[Memory] = (), transports: Sequence[Transport] = ()) -> None:
        self.memories = sorted(memories, key=lambda memory: memory.address)
        self.native = _native.LocalMemories(
            [
                (
                    memory.address,
                    memory.nbytes,
                    memory.is_writable and memory.device is None,
                    [_region(memory, transport) for transport in transports],
                )
                for memory in self.memories
            ]
        )
        self.read_only = [i for i, memory in enumerate(self.memories) if not memory.is_writable]
        self.extents = np.array([(m.address, m.nbytes) for m in self.memories], np.int64).reshape(-1, 2)
        devices = [-1 if memory.device is None else memory.device for memory in self.memories]
        self.device_of = np.array(devices, np.int32) if max(devices, default=-1) >= 0 else None
        """Of each memory the ordinal of its CUDA device, or -1; None if all is host memory."""


def _region(memory: Memory, transport: Transport) -> object | None:
    region = memory.regions.get(transport.name)
    return None if region is None else region_for_core(transport, region)
