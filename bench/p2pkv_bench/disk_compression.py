"""What compressing pages for the disk costs, in processor time, and what it gains.

Processor time of the whole process, not time on the clock: that says the same on a busy machine, and on any disk. What
copying, checking and the disk's own calls cost is in it, with and without compression.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.disk.store import DiskOptions, DiskStore, ReadStatus
from p2pkv_bench.errors import BenchError
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import take_turns
from p2pkv_bench.rows import KIB, MIB, Row, make_row
from p2pkv_bench.working_set import checksums

_NBYTES = 32 * MIB
"""Written and read in a round."""
_BATCH = 128
_PATIENCE_S = 60.0
_UNIT = "GB/s of one core"


def rows(plan: Plan, folder: Path) -> Iterator[Row]:
    """Write and read pages of each size, compressed and not; nothing if there is no zstd."""
    if _native.zstd_missing():
        return
    for page_nbytes in plan.pages:
        if 16 * KIB <= page_nbytes <= 4 * MIB:
            plan.tell(f"disk, compression, {page_nbytes // KIB} KiB")
            yield from _rows(plan, folder / f"compression-{page_nbytes}", page_nbytes)


def _rows(plan: Plan, folder: Path, page_nbytes: int) -> Iterator[Row]:
    folder.mkdir()
    with ExitStack() as undo:
        stores = {name: _Store(folder / name, name, page_nbytes) for name in ("zstd", "off")}
        for store in stores.values():
            undo.callback(store.close)
        writes = take_turns({_label(name): store.write for name, store in stores.items()}, plan.rounds)
        reads = take_turns({_label(name): store.read for name, store in stores.items()}, plan.rounds)
        case = partial(make_row, suite="disk", unit=_UNIT, page_nbytes=page_nbytes, batch=_BATCH)
        yield case(writes, case=f"write bfloat16 values, {stores['zstd'].ratio:.2f} times smaller")
        yield case(reads, case="read them back")


def _label(compression: str) -> str:
    return "p2pkv" if compression == "zstd" else "not compressed"


class _Store:
    """A store that takes the same pages over and over, under other keys."""

    def __init__(self, path: Path, compression: str, page_nbytes: int) -> None:
        options = DiskOptions(capacity=8 * _NBYTES, compression=compression, fsync="never")
        self._store = DiskStore(str(path), options, node_id="bench", namespace="bench")
        values = np.random.default_rng(1).standard_normal(_NBYTES // 2).astype(np.float32)
        halves = (values.view(np.uint32) >> 16).astype(np.uint16)  # as bfloat16 rounds, towards zero
        self._pages = halves.view(np.uint8).reshape(-1, page_nbytes)
        self._sums = checksums(self._pages)
        self._out = np.zeros_like(self._pages)
        self._keys = np.zeros((len(self._pages), 16), np.uint8)
        self._round = 0

    @property
    def ratio(self) -> float:
        """Bytes of pages for a byte on disk."""
        stats = self._store.stats()
        return stats["stored_bytes"] / stats["written_bytes"]

    def write(self) -> float:
        """Write all pages; return GB a second of processor time."""
        self._round += 1
        words = self._keys.view(np.uint64)
        words[:, 0], words[:, 1] = self._round, np.arange(len(words))
        began = time.process_time()
        for part in self._parts():
            tickets = np.arange(part.start, part.stop, dtype=np.uint64)
            accepted = self._store.write(
                self._keys[part], _spans(self._pages[part]), self._sums[part], tickets
            )
            if not accepted.all() or not self._store.flush(_PATIENCE_S):
                raise BenchError("the disk did not take what it was given")
            self._store.drain_released(len(tickets), 0)
        return _NBYTES / (time.process_time() - began) / 1e9

    def read(self) -> float:
        """Read what was written last; return GB a second of processor time."""
        self._out[:, :8] = 0
        began = time.process_time()
        for part in self._parts():
            statuses = self._store.read(self._keys[part], _spans(self._out[part]), _PATIENCE_S)
            if (statuses != ReadStatus.HIT).any():
                raise BenchError("not all pages came back from disk")
        seconds = time.process_time() - began
        if not np.array_equal(checksums(self._out), self._sums):
            raise BenchError("wrong bytes came from disk")
        return _NBYTES / seconds / 1e9

    def _parts(self) -> Iterator[slice]:
        for first in range(0, len(self._pages), _BATCH):
            yield slice(first, min(len(self._pages), first + _BATCH))

    def close(self) -> None:
        self._store.close()


def _spans(rows: NDArray[np.uint8]) -> NDArray[np.int64]:
    spans = np.empty((len(rows), 2), np.int64)
    spans[:, 0] = rows.ctypes.data + np.arange(len(rows)) * rows.strides[0]
    spans[:, 1] = rows.shape[1]
    return spans
