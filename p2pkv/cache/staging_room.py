"""A call's part of the staging of device memory: halves that take turns, so that reading and copying overlap.

While one round's pages go between a device and one half, the next round's are read into the other, or go on from it.
The copies of one round are under way at a time, and they have ended before their half is used again or given back:
``close`` sees to that, whatever has become of the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.cache.call import PageCall
from p2pkv.memory.staging import DeviceMemory, Staging
from p2pkv.transports.base import Resource

ROUND_NBYTES = 8 << 20
"""What a round of a call that needs several moves at most, unless one page has more. It takes a device some 200 us,
against which a launch and a look-up are little. A guess; not tuned on a device."""


class _Copied(IntEnum):
    """What became of a batch of copies; mirrors ``CopyOutcome`` of native/src/cuda/device.h."""

    DONE = 0
    FAILED = 1
    LOST = 2


@dataclass(frozen=True, slots=True)
class Round:
    """Pages of a call that go through the staging together."""

    rows: slice
    """Which of the call's pages these are."""
    staged: PageCall
    """The call for them, in the staging."""
    chosen: NDArray[np.uint8] | None
    """Those that are copied; None: all."""


class StagingRoom(Resource):
    """Room for one call, of one thread. The loan is given back by ``close``, or kept for ever if a device was lost."""

    def __init__(
        self, staging: Staging, loan: _native.CudaLoan, lengths: NDArray[np.int64], devices: DeviceMemory
    ) -> None:
        """``lengths``: of all pages of the call."""
        self._table = staging.table
        self._loan = loan
        self._memory = devices
        parts = _parts(loan, int(lengths.sum()), int(lengths.max()))
        self.has_halves = len(parts) > 1
        """Whether rounds may overlap; else each has to be over before the next may use the room."""
        self._turns = cycle(parts)
        self._under_way: tuple[Round, list[_native.CudaDevice], _native.CudaCopies] | None = None

    @staticmethod
    def borrow(
        staging: Staging, lengths: NDArray[np.int64], devices: DeviceMemory, timeout: float
    ) -> StagingRoom | None:
        """Return room for at least the largest page, or None if there is none in time."""
        largest = int(lengths.max())
        wanted = min(int(lengths.sum()), 2 * max(largest, ROUND_NBYTES))
        loan = staging.native.borrow(largest, wanted, timeout)
        return None if loan is None else StagingRoom(staging, loan, lengths, devices)

    def turn(self) -> tuple[int, int]:
        """Return address and bytes of the half whose turn it is, not that which copies are under way of.

        Of all there is where there are no halves: then no copies may be under way.
        """
        assert self.has_halves or self._under_way is None
        return next(self._turns)

    def call_at(self, call: PageCall, rows: slice, address: int) -> PageCall:
        """Return the call for some pages of ``call``, in the staging instead: one behind the other."""
        pieces = call.pieces[rows].copy()
        lengths = pieces[:, :, 1].reshape(-1)
        pieces[:, :, 0] = (address + np.cumsum(lengths) - lengths).reshape(pieces.shape[:2])
        return PageCall(
            call.ids[rows],
            pieces,
            call.lengths[rows],
            np.zeros(pieces.shape[:2], np.int32),
            self._table,
        )

    def begin(
        self,
        devices: list[_native.CudaDevice],
        index_of: NDArray[np.int32],
        there: NDArray[np.int64],
        round_: Round,
        *,
        is_to_device: bool,
    ) -> None:
        """Begin the copies of a round between ``there``, its pieces on devices, and the staging; others have ended."""
        assert self._under_way is None
        copies = _native.cuda_begin_copies(
            devices, index_of, there, round_.staged.pieces, round_.chosen, is_to_device
        )
        self._under_way = round_, devices, copies

    @property
    def is_copying(self) -> bool:
        """Whether there is a round to wait for."""
        return self._under_way is not None

    def wait(self) -> tuple[Round, bool] | None:
        """Block until the copies under way have ended; return their round, and whether all were made.

        None if there are none. One that failed has been reported.
        """
        if self._under_way is None:
            return None
        round_, devices, copies = self._under_way
        copied, error = copies.wait()
        self._under_way = None
        if copied == _Copied.DONE:
            return round_, True
        if copied == _Copied.LOST:
            self._loan.abandon()
        self._memory.report(error, devices)
        return round_, False

    def close(self) -> None:
        """Wait for what is under way, and give the room back. Idempotent."""
        try:
            self.wait()
        finally:
            self._loan.release()


def _parts(loan: _native.CudaLoan, total: int, largest: int) -> list[tuple[int, int]]:
    """Return what rounds use in turn: halves, unless one round is enough, or a page needs more than a half has."""
    address, nbytes = loan.address, loan.nbytes
    half = min(nbytes // 2, max(largest, ROUND_NBYTES))
    is_enough = total <= min(nbytes, ROUND_NBYTES)
    return [(address, nbytes)] if is_enough or largest > half else [(address, half), (address + half, half)]
