"""Device memory for tests: of the emulated driver, or of a real device through CuPy or torch, behind one interface."""

from __future__ import annotations

import ctypes
import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fake_cuda import fake_cuda


class DeviceBuffer(ABC):
    """Bytes of a device, as an array of the library that made them and as what a kernel sees."""

    nbytes: int

    @property
    @abstractmethod
    def array(self) -> Any:
        """``(nbytes,)`` uint8 with DLPack or ``__cuda_array_interface__``."""

    @abstractmethod
    def rows(self, n: int, nbytes: int) -> Any:
        """The first ``n * nbytes`` bytes as an array of ``n`` rows."""

    @abstractmethod
    def write(self, data: NDArray[np.uint8]) -> None:
        """Replace the first bytes."""

    @abstractmethod
    def read(self, nbytes: int | None = None) -> NDArray[np.uint8]:
        """Return the first bytes, or all, as they are now."""

    @abstractmethod
    def copier(self, nbytes: int) -> Callable[[], None]:
        """Return a call that copies so many bytes of page-locked host memory to the first ones, and waits for them."""

    @abstractmethod
    def inner_copier(self, nbytes: int) -> Callable[[], None]:
        """Return a call that copies so many other bytes of the device to the first ones, and waits for them."""

    @abstractmethod
    def fill_later(self, value: int) -> int:
        """Have a kernel fill all bytes on a stream of its own, after some work; return the stream's handle."""

    @property
    @abstractmethod
    def address(self) -> int:
        """Of the first byte."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""


class DeviceRows:
    """What CuPy and numba show of theirs."""

    def __init__(self, address: int, shape: tuple[int, ...], **entries: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        } | entries


class EmulatedBuffer(DeviceBuffer):
    is_virtual = False
    """Whether other processes map it by a descriptor, as memory of cuMemCreate, or by a handle, as cudaMalloc's."""

    def __init__(self, nbytes: int, device: int = 0) -> None:
        self.nbytes = nbytes
        self.device = device
        self._fake = fake_cuda()
        self._address = self._fake.allocate(nbytes, device, virtual=self.is_virtual)
        self._streams: list[int] = []

    @property
    def array(self) -> Any:
        return DeviceRows(self._address, (self.nbytes,))

    def rows(self, n: int, nbytes: int, **entries: Any) -> Any:
        return DeviceRows(self._address, (n, nbytes), **entries)

    def tensor(self, shape: tuple[int, ...]) -> DLPackTensor:
        return DLPackTensor(self._address, shape, self.device)

    def write(self, data: NDArray[np.uint8]) -> None:
        self._fake.write(self._address, data)

    def read(self, nbytes: int | None = None) -> NDArray[np.uint8]:
        return self._fake.read(self._address, self.nbytes if nbytes is None else nbytes)

    def copier(self, nbytes: int) -> Callable[[], None]:
        host = np.ones(nbytes, np.uint8)
        return lambda: self.write(host)

    def inner_copier(self, nbytes: int) -> Callable[[], None]:
        return lambda: self.write(self.read(nbytes))

    def fill_later(self, value: int) -> int:
        self._streams.append(self._fake.stream(self.device))
        self._fake.launch_fill(self._streams[-1], self._address, value, self.nbytes, delay_us=50_000)
        return self._streams[-1]

    @property
    def address(self) -> int:
        return self._address

    def close(self) -> None:
        for stream in self._streams:
            self._fake.destroy_stream(stream)
        self._fake.free(self._address)


class VirtualBuffer(EmulatedBuffer):
    is_virtual = True


class CupyBuffer(DeviceBuffer):
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._cupy = importlib.import_module("cupy")
        self._array = self._cupy.zeros(nbytes, self._cupy.uint8)

    @property
    def array(self) -> Any:
        return self._array

    def rows(self, n: int, nbytes: int) -> Any:
        return self._array[: n * nbytes].reshape(n, nbytes)

    def write(self, data: NDArray[np.uint8]) -> None:
        flat = data.reshape(-1)
        self._array[: len(flat)].set(flat)

    def read(self, nbytes: int | None = None) -> NDArray[np.uint8]:
        data: NDArray[np.uint8] = self._array[:nbytes].get()
        return data

    def copier(self, nbytes: int) -> Callable[[], None]:
        host = importlib.import_module("cupyx").empty_pinned(nbytes, np.uint8)
        host.fill(1)
        stream = self._cupy.cuda.Stream(non_blocking=True)

        def copy() -> None:
            self._array[:nbytes].set(host, stream=stream)
            stream.synchronize()

        return copy

    def inner_copier(self, nbytes: int) -> Callable[[], None]:
        other = self._cupy.ones(nbytes, self._cupy.uint8)

        def copy() -> None:
            self._array[:nbytes] = other
            self._cupy.cuda.get_current_stream().synchronize()

        return copy

    def fill_later(self, value: int) -> int:
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        with self._stream:
            busy = self._cupy.ones((2048, 2048), self._cupy.float32)
            for _ in range(50):
                busy = busy @ busy * 1e-4
            self._array.fill(value)
        return int(self._stream.ptr)

    @property
    def address(self) -> int:
        return int(self._array.data.ptr)

    def close(self) -> None:
        del self._array


class TorchBuffer(DeviceBuffer):
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._torch = importlib.import_module("torch")
        self._array = self._torch.zeros(nbytes, dtype=self._torch.uint8, device="cuda")

    @property
    def array(self) -> Any:
        return self._array

    def rows(self, n: int, nbytes: int) -> Any:
        return self._array[: n * nbytes].view(n, nbytes)

    def write(self, data: NDArray[np.uint8]) -> None:
        flat = self._torch.from_numpy(np.ascontiguousarray(data).reshape(-1))
        self._array[: len(flat)].copy_(flat)

    def read(self, nbytes: int | None = None) -> NDArray[np.uint8]:
        data: NDArray[np.uint8] = self._array[:nbytes].cpu().numpy()
        return data

    def copier(self, nbytes: int) -> Callable[[], None]:
        host = self._torch.ones(nbytes, dtype=self._torch.uint8, pin_memory=True)

        def copy() -> None:
            self._array[:nbytes].copy_(host, non_blocking=True)
            self._torch.cuda.synchronize()

        return copy

    def inner_copier(self, nbytes: int) -> Callable[[], None]:
        other = self._torch.ones(nbytes, dtype=self._torch.uint8, device="cuda")

        def copy() -> None:
            self._array[:nbytes].copy_(other)
            self._torch.cuda.synchronize()

        return copy

    def fill_later(self, value: int) -> int:
        self._stream = self._torch.cuda.Stream()
        with self._torch.cuda.stream(self._stream):
            self._torch.cuda._sleep(50_000_000)  # cycles
            self._array.fill_(value)
        return int(self._stream.cuda_stream)

    @property
    def address(self) -> int:
        return int(self._array.data_ptr())

    def close(self) -> None:
        del self._array


KINDS: dict[str, type[DeviceBuffer]] = {
    "emulated": EmulatedBuffer,
    "emulated_virtual": VirtualBuffer,
    "cupy": CupyBuffer,
    "torch": TorchBuffer,
}


REAL = ("cupy", "torch")


def find_real(wanted: Sequence[str] = REAL) -> tuple[list[str], str]:
    """Return the kinds of real device memory that can be had here, and why others can't."""
    found, reasons = [], []
    for name in wanted:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # theirs, when they are imported: no reason to skip
                KINDS[name](1).close()
        except Exception as error:  # noqa: BLE001 - whatever keeps a GPU library from its GPU is the reason to skip
            reasons.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
        else:
            found.append(name)
    return found, "; ".join(reasons)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class DLPackTensor:
    """What torch shows of its tensors: DLPack, whose producer is told which stream is to wait."""

    def __init__(self, address: int, shape: tuple[int, ...], device: int = 0) -> None:
        self.streams: list[int] = []
        self._device = device
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        kind = _DLTensor(address, 2, device, len(shape), 1, 8, 1, self._shape, None, 0)
        self._managed = _DLManagedTensor(kind, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device

    def __dlpack__(self, *, stream: int) -> Any:
        self.streams.append(stream)
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)
