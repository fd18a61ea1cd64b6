"""What a caller holds of a transfer: the producer's :class:`Offer`, the receiver's :class:`Grant`."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.lifetime import Origin
from p2pkv.transports.base import Resource

RowSpans = NDArray[np.int64]
"""``(n, 2)``: address and length of each row; bytes."""

RowStatuses = NDArray[np.uint8]
"""``(n,)`` of :class:`RowStatus`."""


class RowStatus(IntEnum):
    """What became of one row of a request. Only ``OK`` says anything about its bytes."""

    OK = 0
    """The receiver has exactly the offered bytes."""
    PENDING = 1
    OUT_OF_RANGE = 2
    """The receiver granted no such row, or another length."""
    REJECTED = 3
    """The producer withdrew it before it was proven."""
    CANCELED = 4
    """The receiver revoked its grant, or a node is closing."""
    PEER_LOST = 5
    TIMED_OUT = 6
    DUPLICATE = 7
    """The receiver has had this row of this request already."""
    DEVICE_FAILED = 8
    """Its copy from or to a device failed; the log says why."""
    GONE = 9
    """It was offered to whoever asks, and that offer is over: taken, withdrawn, or lapsed."""


def _told(statuses: RowStatuses, report: Callable[[], None]) -> RowStatuses:
    """Return ``statuses``; the first to see a device fail says why."""
    if (statuses == RowStatus.DEVICE_FAILED).any():
        report()
    return statuses


class Stowed:
    """A copy of rows in the buddy pool; its room is free when this is gone and nobody is offered it any more."""

    def __init__(self, native: _native.Stowed) -> None:
        self._native = native
        self.spans: RowSpans = native.spans()
        """Where each row lies, which may be offered, as registered memory may, as long as this is there.

        Address and bytes are 0 of rows that somebody had taken before the others were stowed.
        """


class Offer:
    """Rows that peers may pull. Dropped, it stays offered until its lease ends. Thread-safe.

    In a forked child calls raise :class:`~p2pkv.errors.ClosedError`: it is the parent's.
    """

    def __init__(self, native: _native.Offer, request: str, n_rows: int, report: Callable[[], None]) -> None:
        self._native, self._origin = native, Origin()
        self._report = report
        self.request = request
        self.n_rows = n_rows

    @property
    def _ours(self) -> _native.Offer:
        self._origin.require(f"offer {self.request!r}")
        return self._native

    def done(self) -> bool:
        """Return whether every row has its final status: then the memory is the caller's again."""
        return self._ours.done()

    def wait(self, timeout: float) -> RowStatuses:
        """Block until :meth:`done`, at most ``timeout`` seconds; rows may still be ``PENDING``. Never withdraws."""
        self._ours.wait(timeout)
        return _told(self._ours.statuses(), self._report)

    def withdraw(self) -> RowStatuses:
        """End the offer: when this returns the memory may be reused, and no later pull of it counts.

        Rows the receiver has proven stay ``OK``, the others become ``REJECTED``. Never blocks on the peer. Idempotent.
        """
        return self.end(RowStatus.REJECTED)

    def stow(self) -> Stowed | None:
        """Copy the rows to the buddy pool and offer the copies: the memory is the caller's again, the offer goes on.

        None, and what is not done lies where it lay, if there is no room for all, a device has failed, it is a put, or
        the offer is over. Blocks for the copy. A pull that is under way is ``REJECTED`` at its receiver, who may ask
        once more.
        """
        native = self._ours.stow()
        return None if native is None else Stowed(native)

    def end(self, reason: RowStatus) -> RowStatuses:
        """Withdraw, and say why in the rows that were pending."""
        self._ours.withdraw(reason)
        return _told(self._ours.statuses(), self._report)

    def statuses(self) -> RowStatuses:
        """Return what is known of each row now."""
        return _told(self._ours.statuses(), self._report)


class Grant(Resource):
    """Memory that rows of one request are pulled into. Dropped, it is revoked. Thread-safe.

    In a forked child it is the parent's: calls raise :class:`~p2pkv.errors.ClosedError`, and closing does nothing.
    """

    def __init__(self, native: _native.Grant, request: str, n_rows: int, report: Callable[[], None]) -> None:
        self._native, self._origin = native, Origin()
        self._report = report
        self.request = request
        self.n_rows = n_rows

    @property
    def _ours(self) -> _native.Grant:
        self._origin.require(f"grant {self.request!r}")
        return self._native

    def done(self) -> bool:
        """Return whether no row is ``PENDING`` and nothing writes to the memory any more."""
        return self._ours.done()

    def wait(self, timeout: float) -> RowStatuses:
        """Block until :meth:`done`, at most ``timeout`` seconds.

        At the grant's own deadline it is revoked, and rows that did not come are ``TIMED_OUT``.
        """
        self._ours.wait(timeout)
        return _told(self._ours.statuses(), self._report)

    def revoke(self) -> RowStatuses:
        """End the grant: when this returns nothing writes to the memory any more; pending rows are ``CANCELED``.

        What is under way is broken off and not waited for. Idempotent.
        """
        return self.end(RowStatus.CANCELED)

    def end(self, reason: RowStatus) -> RowStatuses:
        """Revoke, and say why in the rows that were pending."""
        self._ours.revoke(reason)
        return _told(self._ours.statuses(), self._report)

    def statuses(self) -> RowStatuses:
        """Return what is known of each row now."""
        return _told(self._ours.statuses(), self._report)

    def close(self) -> None:
        if self._origin.is_here:
            self.revoke()
