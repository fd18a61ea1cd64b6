"""The cuda_ipc transport on the emulated driver, for the contract suite: in host memory, and in device memory.

The suite looks at the memory that it registers. So for the second the driver takes that very memory for a device's:
its copies are then a device's copies, on the driver's own thread.
"""

from __future__ import annotations

from fake_cuda import fake_cuda
from p2pkv import _native
from p2pkv.transports.base import FdBacked
from p2pkv.transports.cuda_ipc import CudaIpcTransport
from p2pkv.transports.native import NativeMemoryRegion


class _AdoptedRegion(NativeMemoryRegion):
    """Host memory again, once nobody reads it as a device's."""

    _is_adopted = True

    def close(self) -> None:
        super().close()
        if self._is_adopted:
            self._is_adopted = False
            fake_cuda().disown(self.address)


class _InDeviceMemory(CudaIpcTransport):
    """What is registered counts as device memory; readers look its words up in the memfd behind it."""

    def __init__(self) -> None:
        super().__init__()
        self._regions: list[_AdoptedRegion] = []

    def register_memory(
        self, buffer: object, address: int, nbytes: int, *, readable: bool
    ) -> NativeMemoryRegion:
        fd = buffer.fd if isinstance(buffer, FdBacked) else -1
        fake_cuda().adopt(address, nbytes, fd)
        try:
            known = super().register_memory(buffer, address, nbytes, readable=readable)
        except Exception:
            fake_cuda().disown(address)
            raise
        self._regions.append(_AdoptedRegion(known.native, buffer))
        return self._regions[-1]

    def close(self) -> None:
        super().close()
        for region in self._regions:
            region.close()


def in_host_memory() -> CudaIpcTransport:
    _native.cuda_use_library(fake_cuda().path)
    return CudaIpcTransport()


def in_device_memory() -> CudaIpcTransport:
    _native.cuda_use_library(fake_cuda().path)
    return _InDeviceMemory()
