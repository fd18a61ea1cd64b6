"""Arrays in CUDA device memory, taken by DLPack or ``__cuda_array_interface__``: where their bytes are, and when.

An array's bytes may be a kernel's that has not run yet. Both protocols say how to find out: DLPack's producer makes a
stream of our choice, the legacy default stream, wait for them; the interface names the stream to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.arrays.host import device_of, is_cuda
from p2pkv.errors import UsageError

_LEGACY_STREAM = 1
"""The number is DLPack's and the driver's. -1, for no order at all, is in the standard, but not all take it."""


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """An array in device memory, which stays its maker's."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes."""
    itemsize: int
    is_writable: bool
    stream: int | None
    """What is queued on this CUDA stream must be done before the bytes may be used; None: nothing."""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    def is_contiguous(self, first: int = 0) -> bool:
        """Whether its elements, from dimension ``first`` on, lie in a row in C order."""
        step = self.itemsize
        for size, stride in zip(reversed(self.shape[first:]), reversed(self.strides[first:]), strict=True):
            if size > 1 and stride != step:
                return False
            step *= size
        return True

    def row_pieces(self) -> NDArray[np.int64]:
        """Return ``(n, 1, 2)`` int64: address and length of each row.

        Raises :class:`UsageError` if a row's bytes lie scattered.
        """
        if not self.shape or not self.is_contiguous(1):
            raise UsageError(f"an array of pages needs C-contiguous rows; this has strides {self.strides}")
        n_pages = self.shape[0]
        row = self.nbytes // n_pages if n_pages else 0
        return _native.row_pieces(self.address, self.strides[0], row, n_pages)

    @property
    def rows_overlap(self) -> bool:
        """Whether a byte belongs to more than one row."""
        return self.shape[0] > 1 and abs(self.strides[0]) < self.nbytes // self.shape[0]


def as_device_array(memory: object, what: str, *, is_used: bool) -> DeviceArray | None:
    """Return where an array of a CUDA device lies; None if ``memory`` is anything else.

    ``is_used``: its bytes are, so that it says which stream to wait for. ``what`` it is begins the message of the
    :class:`~p2pkv.errors.UsageError` for what can't be taken.
    """
    if isinstance(memory, np.ndarray):  # asking it would cost more than all else of a small call's checks
        return None
    device = device_of(memory)
    if device is None or not is_cuda(device):
        return None
    if hasattr(memory, "__dlpack__"):
        return _by_dlpack(memory, what, is_used=is_used)
    return _by_interface(memory, what, is_used=is_used)


def _by_dlpack(memory: Any, what: str, *, is_used: bool) -> DeviceArray:
    try:
        tensor = memory.__dlpack__(stream=_LEGACY_STREAM)
        address, shape, strides, itemsize = _native.cuda_layout(tensor)
    except (BufferError, RuntimeError, TypeError) as error:
        raise UsageError(
            f"{what}, a {type(memory).__name__}, can't be taken by DLPack: {error}; a tensor with gradients has to be "
            "detached first"
        ) from error
    stream = _LEGACY_STREAM if is_used else None
    return DeviceArray(address, tuple(shape), tuple(strides), itemsize, is_writable=True, stream=stream)


def _by_interface(memory: Any, what: str, *, is_used: bool) -> DeviceArray:
    try:
        interface = memory.__cuda_array_interface__
        shape = tuple(interface["shape"])
        address, is_read_only = interface["data"]
        itemsize = np.dtype(interface["typestr"]).itemsize
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"{what}, a {type(memory).__name__}, has no proper __cuda_array_interface__: {error}"
        ) from error
    if interface.get("mask") is not None:
        raise UsageError(f"{what} is masked; give the array behind the mask")
    strides = interface.get("strides") or _c_strides(shape, itemsize)
    stream = interface.get("stream") if is_used else None
    return DeviceArray(address, shape, tuple(strides), itemsize, is_writable=not is_read_only, stream=stream)


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for size in reversed(shape):
        strides.append(itemsize)
        itemsize *= size
    return tuple(reversed(strides))
