"""Two emulated network cards (native/test/fake_ibverbs) that reach the emulated driver's memory, of this process.

Stricter than real ones: what a card writes to a device stays with the card until it reads from a device itself.
"""

from __future__ import annotations

import ctypes
import errno
from dataclasses import dataclass
from functools import cache

from emulated import build
from fake_cuda import fake_cuda
from p2pkv import _native

DMABUF, ADDRESS = 0, 1
"""The ways by which memory of a device is registered."""


class _Counts(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("regions", "queue_pairs", "dmabufs", "addresses", "read_from_device", "held_back")
    ]


@dataclass(frozen=True, slots=True)
class Counts:
    """What exists now, then what has happened since the library was loaded: fake_ibverbs.h."""

    regions: int
    queue_pairs: int
    dmabufs: int
    addresses: int
    read_from_device: int
    held_back: int


class FakeIbverbs:
    """The emulated libibverbs of this process; fake_ibverbs.h says what each call does."""

    def __init__(self) -> None:
        driver = fake_cuda().path
        _native.cuda_use_library(driver)
        self.path = build("fake_ibverbs", driver=driver)
        self._library = ctypes.CDLL(self.path)

    def refuse(self, way: int, n: int = -1, error: int = errno.EOPNOTSUPP) -> None:
        """Have the next ``n`` registrations by this way fail; -1: all."""
        self._library.fake_ibverbs_refuse(way, n, error)

    def deceive(self, way: int, n: int = -1) -> None:
        """Have the next ``n`` registrations by this way be of other memory; -1: all."""
        self._library.fake_ibverbs_deceive(way, n)

    def spoil_reads(self) -> None:
        """Have the cards write to devices other bytes than they have read, but for 64 and less."""
        self._library.fake_ibverbs_spoil_reads()

    def reset(self) -> None:
        self._library.fake_ibverbs_reset()

    def counts(self) -> Counts:
        counts = _Counts()
        self._library.fake_ibverbs_counts(ctypes.byref(counts))
        return Counts(*(getattr(counts, name) for name, _ in _Counts._fields_))


@cache
def fake_ibverbs() -> FakeIbverbs:
    return FakeIbverbs()
