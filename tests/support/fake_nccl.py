"""The emulated NCCL (native/test/fake_nccl) on the emulated driver, and a transport over them for contract suites.

Its ranks meet, and pass bytes, over a Unix socket. It refuses memory that is not page-locked, calls that could block,
and sides that mean different numbers of bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from emulated import build
from fake_cuda import fake_cuda
from p2pkv import _native
from p2pkv.transports.nccl import NcclOptions, NcclTransport

REMOTE_ERROR = 6
"""``ncclRemoteError``."""


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("communicators", "met", "aborts", "sends", "sent_bytes")]


@dataclass(frozen=True, slots=True)
class Counts:
    """What exists now, then what has happened since the library was loaded."""

    communicators: int
    met: int
    aborts: int
    sends: int
    sent_bytes: int


class FakeNccl:
    """The emulated NCCL of this process; fake_nccl.h says what each call does."""

    def __init__(self) -> None:
        driver = fake_cuda().path
        _native.cuda_use_library(driver)
        self.path = build("fake_nccl", driver=driver)
        self._library = ctypes.CDLL(self.path)

    def counts(self) -> Counts:
        counts = _Counts()
        self._library.fake_nccl_counts(ctypes.byref(counts))
        return Counts(*(getattr(counts, name) for name, _ in _Counts._fields_))

    @contextmanager
    def told(
        self,
        *,
        never_meet: bool = False,
        failing_meeting: int = 0,
        failing_operation: int = 0,
        held: bool = False,
        delay_us: int = 0,
        abort_delay_us: int = 0,
    ) -> Iterator[None]:
        """Do as told until the end of the block; then all is well again."""
        self._library.fake_nccl_never_meet(int(never_meet))
        self._library.fake_nccl_fail_meeting(failing_meeting, REMOTE_ERROR)
        self._library.fake_nccl_fail_operation(failing_operation, REMOTE_ERROR)
        self._library.fake_nccl_hold(int(held))
        self._library.fake_nccl_delay(delay_us)
        self._library.fake_nccl_delay_aborts(abort_delay_us)
        try:
            yield
        finally:
            self._library.fake_nccl_reset()


@cache
def fake_nccl() -> FakeNccl:
    return FakeNccl()


def transport() -> NcclTransport:
    """Return a transport over the emulated NCCL, in whichever process this is called."""
    return NcclTransport(options=NcclOptions(library=fake_nccl().path))
