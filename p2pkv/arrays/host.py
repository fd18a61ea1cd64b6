"""Host memory that is no numpy array: tensors of torch and others, taken through DLPack without a copy.

Device memory is refused here, by name, before a processor would copy from an address that only a GPU can read. That of
CUDA devices is what ``device_arrays.py`` takes, where a call can use it.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import UsageError


class SupportsDLPack(Protocol):
    """What tensors of torch, JAX, CuPy and others are."""

    def __dlpack__(self, /, *, stream: None = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


class SupportsCudaArray(Protocol):
    """What arrays of CuPy, numba and others on CUDA devices are."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


HostArray: TypeAlias = "NDArray[Any] | SupportsDLPack"

_ADVICE = "copy to host memory first, as engines do for their host tiers (docs/transports.md, GPU memory)"


class _Device(IntEnum):
    """The device types of DLPack that are meant here."""

    CPU = 1
    CUDA = 2
    CUDA_HOST = 3
    ROCM = 10
    ROCM_HOST = 11
    CUDA_MANAGED = 13


_NUMPY_TELLS = tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 1)
_HOST = frozenset({_Device.CPU, _Device.CUDA_HOST, _Device.ROCM_HOST})


def as_host_array(memory: object, what: str) -> NDArray[Any]:
    """Return ``memory`` as a numpy array of the same bytes, which keeps it alive; writable unless ``memory`` says not.

    Takes numpy arrays and whatever offers host memory by DLPack, pinned memory included. ``what`` it is begins the
    message of the :class:`~p2pkv.errors.UsageError` for anything else.
    """
    if isinstance(memory, np.ndarray):
        return memory
    device = device_of(memory)
    if device is None:
        raise UsageError(
            f"{what} must be a numpy array or host memory with DLPack, not {type(memory).__name__}"
        )
    if device not in _HOST:
        raise UsageError(
            f"{what} is memory of a device ({_name(device)}), where only host memory can be used: {_ADVICE}"
        )
    try:
        array = np.from_dlpack(memory)  # type: ignore[arg-type]
    except (BufferError, RuntimeError, TypeError) as error:
        raise UsageError(
            f"{what}, a {type(memory).__name__}, can't be taken by DLPack: {error}; a type that numpy lacks (bfloat16) "
            "has to be viewed as uint8 first, a tensor with gradients to be detached"
        ) from error
    return array if array.flags.writeable else _writable(array)


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """Return the same bytes as an array that may be written: numpy before 2.1 takes all that comes by DLPack read-only.

    It keeps what it was made from alive. One that has no C order stays as it is, and is refused where that matters.
    """
    if not array.flags.c_contiguous or array.nbytes == 0 or _NUMPY_TELLS:
        return array
    block = (ctypes.c_byte * array.nbytes).from_address(array.ctypes.data)
    block._owner = array  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(block), array.dtype).reshape(array.shape)


def is_cuda(device: int) -> bool:
    """Whether that is DLPack's number of a kind of memory that the CUDA driver knows as a device's."""
    return device in (_Device.CUDA, _Device.CUDA_MANAGED)


def device_of(memory: object) -> int | None:
    """Return DLPack's number of the device whose memory it is, or None if it does not say."""
    tell = getattr(memory, "__dlpack_device__", None)
    if tell is not None:
        return int(tell()[0])
    return int(_Device.CUDA) if hasattr(memory, "__cuda_array_interface__") else None


def _name(device: int) -> str:
    return _Device(device).name if device in _Device.__members__.values() else f"DLPack type {device}"
