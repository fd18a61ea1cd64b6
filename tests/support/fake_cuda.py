"""The emulated NVIDIA driver (native/test/fake_cuda), built with the system's compiler and told what to do.

Its device memory can't be touched by a processor, and its copies happen later, on another thread: who forgets to go
through the driver crashes, and who forgets to wait has wrong bytes.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from emulated import build


class _Counts(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "contexts",
            "streams",
            "events",
            "locked_bytes",
            "copies_to_device",
            "copies_to_host",
            "copied_bytes",
            "queued",
            "mappings",
            "copies_within",
            "launches",
            "exports",
            "exports_over_pcie",
            "modules",
            "kernel_slices",
            "freed_while_mapped",
        )
    ]


@dataclass(frozen=True, slots=True)
class Counts:
    """What exists now, what has happened since the library was loaded, and what is not done yet: fake_cuda.h."""

    contexts: int
    streams: int
    events: int
    locked_bytes: int
    copies_to_device: int
    copies_to_host: int
    copied_bytes: int
    queued: int
    mappings: int
    copies_within: int
    launches: int
    exports: int
    exports_over_pcie: int
    modules: int
    kernel_slices: int
    freed_while_mapped: int

    @property
    def held(self) -> tuple[int, ...]:
        """What must be the same again when everything was given back."""
        return self.contexts, self.streams, self.events, self.locked_bytes, self.mappings, self.modules


class FakeCuda:
    """The emulated driver of this process; fake_cuda.h says what each call does."""

    def __init__(self) -> None:
        self.path = build("fake_cuda")
        self._library = ctypes.CDLL(self.path)
        self._library.fake_cuda_allocate.restype = ctypes.c_uint64
        self._library.fake_cuda_allocate_virtual.restype = ctypes.c_uint64
        self._library.fake_cuda_stream.restype = ctypes.c_uint64
        self.n_losses = 0
        """Devices that were lost so far: page-locked memory that one may write to is never given back."""

    def allocate(self, nbytes: int, device: int = 0, *, virtual: bool = False) -> int:
        """Return the address of device memory as cudaMalloc gives it, or as cuMemCreate does."""
        call = self._library.fake_cuda_allocate_virtual if virtual else self._library.fake_cuda_allocate
        address = int(call(device, ctypes.c_size_t(nbytes)))
        assert address
        return address

    def adopt(self, address: int, nbytes: int, fd: int = -1, device: int = 0) -> None:
        """Have host memory count as device memory, until it is disowned; ``fd`` is the memfd behind it."""
        adopted = self._library.fake_cuda_adopt(device, ctypes.c_uint64(address), ctypes.c_size_t(nbytes), fd)
        assert adopted == 0

    def disown(self, address: int) -> None:
        assert self._library.fake_cuda_disown(ctypes.c_uint64(address)) == 0

    def free(self, address: int) -> None:
        assert self._library.fake_cuda_free(ctypes.c_uint64(address)) == 0

    def write(self, address: int, array: NDArray[np.uint8]) -> None:
        data = np.ascontiguousarray(array)
        size = ctypes.c_size_t(data.nbytes)
        assert (
            self._library.fake_cuda_write(ctypes.c_uint64(address), ctypes.c_void_p(data.ctypes.data), size)
            == 0
        )

    def read(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        data = np.empty(nbytes, np.uint8)
        size = ctypes.c_size_t(nbytes)
        assert (
            self._library.fake_cuda_read(ctypes.c_void_p(data.ctypes.data), ctypes.c_uint64(address), size)
            == 0
        )
        return data

    def stream(self, device: int = 0) -> int:
        return int(self._library.fake_cuda_stream(device))

    def destroy_stream(self, stream: int) -> None:
        self._library.fake_cuda_destroy_stream(ctypes.c_uint64(stream))

    def launch_fill(self, stream: int, address: int, value: int, nbytes: int, *, delay_us: int = 0) -> None:
        handle, to, size = ctypes.c_uint64(stream), ctypes.c_uint64(address), ctypes.c_size_t(nbytes)
        assert self._library.fake_cuda_launch_fill(handle, to, ctypes.c_uint8(value), size, delay_us) == 0

    def fail(self, call: str, result: int, *, nth: int = 1, stays: bool = False) -> None:
        self._library.fake_cuda_fail(call.encode(), nth, result, int(stays))

    def lose(self, device: int = 0) -> None:
        self.n_losses += 1
        self._library.fake_cuda_lose(device)

    def delay_copies(self, us: int) -> None:
        self._library.fake_cuda_delay_copies(us)

    def hold(self, *, copies: bool = False, kernels: bool = False) -> None:
        self._library.fake_cuda_hold(int(copies), int(kernels))

    def let_through(self, copies: int) -> None:
        """Let so many of the copies go that are held, or will be."""
        self._library.fake_cuda_let_through(copies)

    def let_go(self) -> None:
        """Hold nothing, and return when all that was held has been done."""
        self.hold()
        while self.counts().queued:
            time.sleep(0.001)

    def lie_about_events(self) -> None:
        self._library.fake_cuda_lie_about_events(1)

    def reset(self) -> None:
        self._library.fake_cuda_reset()

    def counts(self) -> Counts:
        counts = _Counts()
        self._library.fake_cuda_counts(ctypes.byref(counts))
        return Counts(*(getattr(counts, name) for name, _ in _Counts._fields_))


@cache
def fake_cuda() -> FakeCuda:
    return FakeCuda()


@cache
def has_fake_cuda() -> bool:
    """Whether there is an emulated driver to be had here."""
    try:
        fake_cuda()
    except OSError:  # no compiler to build it with
        return False
    return True
