"""Registering memory: the host's with the transports, a device's with its driver, and no byte of it twice."""

from __future__ import annotations

import operator
import threading

from p2pkv.arrays.device import as_device_array
from p2pkv.arrays.host import as_host_array
from p2pkv.errors import DeviceError, UsageError
from p2pkv.memory.registered import Memory
from p2pkv.memory.registrations import Registrations
from p2pkv.memory.staging import DeviceMemory, why_unknown

_HIGHEST_ADDRESS = 2**63 - 1
"""Above it are kernels; and addresses travel to native code as signed numbers."""


class Registrar:
    """What stands behind ``Node.register_memory`` and ``Node.register_address``. Thread-safe."""

    def __init__(self, registrations: Registrations, devices: DeviceMemory) -> None:
        self._registrations = registrations
        self._devices = devices
        self._lock = threading.Lock()  # held from the look for overlaps to the registration

    def register(self, buffer: object, nbytes: int | None, *, is_readable: bool) -> Memory:
        """Register the beginning, or all, of an array, wherever it lies."""
        what = "memory to register"
        on_device = as_device_array(buffer, what, is_used=False)
        if on_device is not None:
            if not on_device.is_contiguous():
                raise UsageError(f"{what} must be C-contiguous")
            length = _length(nbytes, on_device.nbytes)
            address, length = _checked(on_device.address, length)
            device = self._devices.find(address, length)
            if device is None:
                raise DeviceError(
                    f"cannot register memory that is said to be on a device: {why_unknown(address)}"
                )
            return self._register_on(
                device, address, length, buffer, is_writable=on_device.is_writable, is_readable=is_readable
            )
        array = as_host_array(buffer, what)
        if not array.flags.c_contiguous or array.dtype.hasobject:
            raise UsageError(f"{what} must be C-contiguous and of plain values")
        address, length = _checked(array.ctypes.data, _length(nbytes, array.nbytes))
        return self._register_host(
            address, length, array, is_writable=array.flags.writeable, is_readable=is_readable
        )

    def register_address(self, address: int, nbytes: int, owner: object, *, is_readable: bool) -> Memory:
        """Register what lies at an address, the host's or a device's."""
        address, nbytes = _checked(address, nbytes)
        device = self._devices.find(address, nbytes)
        if device is None:
            return self._register_host(address, nbytes, owner, is_writable=True, is_readable=is_readable)
        return self._register_on(device, address, nbytes, owner, is_writable=True, is_readable=is_readable)

    def _register_host(
        self, address: int, nbytes: int, owner: object, *, is_writable: bool, is_readable: bool
    ) -> Memory:
        with self._lock:
            self._check_overlaps(address, nbytes)
            return self._registrations.add(
                owner, address, nbytes, is_writable=is_writable, is_readable=is_readable
            )

    def _register_on(
        self, device: int, address: int, nbytes: int, owner: object, *, is_writable: bool, is_readable: bool
    ) -> Memory:
        with self._lock:
            self._check_overlaps(address, nbytes)
            return self._registrations.add_device(
                owner,
                address,
                nbytes,
                device=self._devices.use(device),
                is_writable=is_writable,
                is_readable=is_readable,
            )

    def _check_overlaps(self, address: int, nbytes: int) -> None:
        for other in self._registrations.table.memories:
            if address < other.address + other.nbytes and other.address < address + nbytes:
                raise UsageError(
                    f"memory at {address:#x} of {nbytes} bytes overlaps what is registered at "
                    f"{other.address:#x} of {other.nbytes} bytes"
                )


def _length(nbytes: int | None, available: int) -> int:
    if nbytes is not None and nbytes > available:
        raise UsageError(f"cannot register {nbytes} bytes of an array of {available}")
    return available if nbytes is None else nbytes


def _checked(address: int, nbytes: int) -> tuple[int, int]:
    try:
        address, nbytes = operator.index(address), operator.index(nbytes)
    except TypeError as error:
        raise UsageError(f"address and length of memory to register must be integers: {error}") from error
    if nbytes <= 0:
        raise UsageError(f"cannot register {nbytes} bytes of memory")
    if not 0 < address <= _HIGHEST_ADDRESS - nbytes:
        raise UsageError(f"no process has {nbytes} bytes of memory at {address:#x}")
    return address, nbytes
