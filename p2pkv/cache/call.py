"""A call's pages, checked: every piece in registered memory of one kind, of positive length, no key twice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.arrays.device import as_device_array
from p2pkv.arrays.host import as_host_array
from p2pkv.errors import NotRegisteredError, UsageError
from p2pkv.memory.registered import MemoryTable
from p2pkv.page import Keys, Pages, Pieces, row_pieces

_WHAT = "pages, if not Pieces,"


@dataclass(slots=True)  # not frozen: that triples the time it takes to make one
class PageCall:
    """The pages of one call."""

    ids: Keys
    pieces: NDArray[np.int64]  # (n, p, 2)
    lengths: NDArray[np.int64]
    memory_of: NDArray[np.int32]  # (n, p): index into the table
    table: MemoryTable
    device_of: NDArray[np.int32] | None = None  # (n, p): ordinal of the device; None: all is host memory
    stream: int | None = None  # of a device: what is queued on it comes before the call's copies


def check_call(
    ids: Keys, pages: Pages, table: MemoryTable, stream: int | None, *, writable: bool
) -> PageCall:
    """Return the call, or raise :class:`UsageError` saying what is wrong with it."""
    pieces, ready = _pieces(pages, writable=writable)
    if len(pieces) != len(ids):
        raise UsageError(f"{len(ids)} keys, but memory for {len(pieces)} pages")
    is_good, memory_of, lengths = _native.locate_pieces(pieces, table.extents)
    if not is_good:
        raise _bad_pieces(pieces, memory_of, lengths)
    if writable and table.read_only and np.isin(memory_of, table.read_only).any():
        raise UsageError(
            "the pages are to be written, but their memory was registered from a read-only array"
        )
    call = PageCall(ids, pieces, lengths, memory_of, table)
    if table.device_of is not None:
        _look_for_devices(call, table.device_of)
    if call.device_of is not None:
        call.stream = ready if stream is None else _checked_stream(stream)
    elif stream is not None:
        raise UsageError("a stream is named, but the pages are in host memory: there is nothing to wait for")
    return call


def _checked_stream(stream: int) -> int:
    if isinstance(stream, bool) or not isinstance(stream, int) or stream < 0:
        raise UsageError(f"stream must be the handle of a CUDA stream, a number, not {stream!r}")
    return stream


def _look_for_devices(call: PageCall, device_of_memory: NDArray[np.int32]) -> None:
    device_of = device_of_memory[call.memory_of]
    on_device = device_of >= 0
    if on_device.all():
        call.device_of = device_of
    elif on_device.any():
        page, piece = np.argwhere(on_device)[0].tolist()
        raise UsageError(
            f"piece {piece} of page {page} is in device memory, and others of the call are in host memory; "
            "make two calls of it"
        )


def _pieces(pages: Pages, *, writable: bool) -> tuple[NDArray[np.int64], int | None]:
    """Return ``(n, p, 2)`` and the stream, if any, that has to be waited for."""
    if isinstance(pages, Pieces):
        return pages.array, None
    # a numpy array is what most calls have, and is the host's: nobody needs to be asked
    array = None if isinstance(pages, np.ndarray) else as_device_array(pages, _WHAT, is_used=True)
    if array is not None:
        if writable and not array.is_writable:
            raise UsageError("the pages are to be written, but their array is read-only")
        of_rows = array.row_pieces()
        if writable and array.rows_overlap:
            raise UsageError("the pages are to be written, but the rows of their array overlap")
        return of_rows, array.stream
    rows = pages if isinstance(pages, np.ndarray) else as_host_array(pages, _WHAT)
    pieces = row_pieces(rows)
    if writable and not rows.flags.writeable:
        raise UsageError("the pages are to be written, but their array is read-only")
    if writable and len(rows) > 1 and abs(rows.strides[0]) < rows.nbytes // len(rows):
        raise UsageError("the pages are to be written, but the rows of their array overlap")
    return pieces, None


def _bad_pieces(
    pieces: NDArray[np.int64], memory_of: NDArray[np.int32], lengths: NDArray[np.int64]
) -> UsageError:
    if lengths.min() < 0:
        page = int(lengths.argmin())
        return UsageError(f"page {page} has a piece of no or negative length: {pieces[page].tolist()}")
    page, piece = np.argwhere(memory_of < 0)[0].tolist()
    address, nbytes = pieces[page, piece].tolist()
    return NotRegisteredError(
        f"piece {piece} of page {page}, {nbytes} bytes at {address:#x}, lies in no registered memory; "
        "call register_memory first"
    )
