"""What a node has of devices: those whose memory is registered, and the staging that their bytes go through.

Nothing of it exists, and no driver is loaded, before device memory is registered. The staging is page-locked host
memory, registered with every transport as any local memory is: peers' pages are read into it, and proven there. So no
transport knows of devices. It costs a copy over PCIe, and the pages of a call that it has no room for wait for the next
round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2pkv import _native
from p2pkv.errors import ConfigError, DeviceError, UsageError
from p2pkv.limited_log import LimitedLog
from p2pkv.memory.registered import Memory, MemoryTable
from p2pkv.memory.registrations import Registrations
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Staging:
    """Page-locked memory, and its registration with the transports: a table of which it is the only memory."""

    native: _native.CudaStaging
    memory: Memory
    table: MemoryTable


class DeviceMemory(Resource):
    """The devices of one node and their staging. Thread-safe."""

    def __init__(
        self,
        registrations: Registrations,
        staging_nbytes: int,
        kernel_blocks: int = 0,
        show: Callable[[int, int, int], Callable[[], None]] | None = None,
    ) -> None:
        """``kernel_blocks``: what a device lends for copies of small pieces; 0: nothing.

        ``show`` has another process read the staging where it is, which takes a memfd: it is given address, bytes and
        descriptor, and returns what ends that.
        """
        self._registrations = registrations
        self._kernel_blocks = kernel_blocks
        self._show = show
        self._staging_nbytes = staging_nbytes
        # guards all below; held while the staging is made. Reentrant, for a signal's handler may close the node
        self._lock = threading.RLock()
        self._devices: dict[int, _native.CudaDevice] = {}
        self._staging: Staging | None = None
        self._log = LimitedLog(_log)
        self.is_ending = False

    def find(self, address: int, nbytes: int) -> int | None:
        """Return the device whose memory these bytes are; None: no device's, as far as a driver in use knows.

        Raises :class:`UsageError` if only some of them are.
        """
        found = _native.cuda_range(address)
        if found is None:
            return None
        start, length, ordinal = found
        if length and address + nbytes > start + length:
            raise UsageError(
                f"{nbytes} bytes at {address:#x} are not all of one allocation: CUDA device {ordinal} has {length} at "
                f"{start:#x}"
            )
        return ordinal

    def use(self, ordinal: int) -> _native.CudaDevice:
        """Open a device, and make the staging if this is the first; that blocks for as long as locking it takes.

        Raises :class:`DeviceError` if the driver, or a transport, refuses.
        """
        made: Staging | None = None
        with self._lock:
            try:
                if ordinal not in self._devices:
                    self._devices[ordinal] = self._open(ordinal)
                device = self._devices[ordinal]
                if self._staging is None:
                    made = self._staging = self._make_staging(device)
            except RuntimeError as error:
                raise DeviceError(f"cannot use device memory: {error}") from error
        if made is not None and self._show is not None:
            # Not with the lock, which metrics ask for: a process that is stopped is waited for.
            native = made.native
            made.memory.on_close(self._show(native.address, native.nbytes, native.fd))
        return device

    def _open(self, ordinal: int) -> _native.CudaDevice:
        device = _native.CudaDevice.open(ordinal)
        if self._kernel_blocks:
            try:
                device.lend_blocks(self._kernel_blocks)
            except RuntimeError as error:
                _log.warning(
                    "copy engines copy small pieces too, though device_kernel_blocks is set: %s", str(error)
                )
        return device

    def _make_staging(self, device: _native.CudaDevice) -> Staging:
        is_shared = self._show is not None
        native = _native.CudaStaging.create(device, self._staging_nbytes, is_shared=is_shared)
        memory = self._registrations.add_unlisted(native, native.address, native.nbytes)
        _log.info(
            "pages in device memory that can't go straight are staged in %d bytes of page-locked host memory",
            native.nbytes,
        )
        return Staging(native, memory, self._registrations.table_of([memory]))

    @property
    def staging(self) -> Staging:
        """Only to be asked for while device memory is registered."""
        with self._lock:
            if self._staging is None:
                raise DeviceError("the staging of device memory was closed")
            return self._staging

    def devices(self, ordinals: Sequence[int]) -> list[_native.CudaDevice]:
        """Return devices in use."""
        with self._lock:
            return [self._devices[ordinal] for ordinal in ordinals]

    def report(self, problem: str, devices: Sequence[_native.CudaDevice]) -> None:
        """Log what went wrong with copies; one cause are all those to devices that are lost."""
        lost = tuple(sorted({device.ordinal for device in devices if device.is_lost}))
        self._log.warning(lost or problem, "pages in device memory could not be moved: %s", problem)

    def readings(self) -> dict[str, float]:
        """Return the metrics of the staging."""
        with self._lock:
            if self._staging is None:
                return {}
            stats = self._staging.native.stats()
        return {
            "p2pkv_device_staging_bytes": stats["nbytes"],
            "p2pkv_device_staging_used_bytes": stats["used_bytes"],
            "p2pkv_device_staging_lost_bytes": stats["lost_bytes"],
        }

    def interrupt(self) -> None:
        """Have calls that wait for a stream give up."""
        self.is_ending = True

    def close(self) -> None:
        """Give the staging and the devices back. No call may be under way. Idempotent."""
        with self._lock:
            staging, self._staging = self._staging, None
            self._devices.clear()
        if staging is not None:
            staging.memory.close()


def use_library(name: str) -> None:
    """Have the driver's library loaded by this name or path when it is needed; ``auto``: by its own, libcuda.so.1.

    Raises :class:`ConfigError` if the process has loaded another.
    """
    if name == "auto":
        return
    try:
        _native.cuda_use_library(name)
    except RuntimeError as error:
        raise ConfigError(f"cuda_library is {name!r}: {error}") from error


def why_unknown(address: int) -> str:
    """Say why no driver knows this address, which an array says is of a CUDA device."""
    try:
        version, devices = _native.cuda_driver()
    except RuntimeError as error:
        return str(error)
    names = ", ".join(devices) or "no device"
    return f"the driver (CUDA {version // 1000}.{version % 1000 // 10}, {names}) has no device memory at {address:#x}"
