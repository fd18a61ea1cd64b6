"""What compression gains and costs, on bytes like those of KV caches; prints what docs/disk.md says of it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from disk_pages import keys_of, open_store, spans_of
from kv_values import KINDS
from p2pkv import _native
from p2pkv.disk.store import ReadStatus

NBYTES = 64 << 10


def measure(path: Path, pages: NDArray[np.uint8], compression: str) -> tuple[float, float, float]:
    """Return the ratio, and bytes a second in GB/s of writing and of reading."""
    n = len(pages)
    store = open_store(path, capacity=4 * pages.nbytes + (16 << 20), compression=compression, fsync="never")
    keys, spans = keys_of(range(n)), spans_of(pages)
    sums = _native.checksum_pages(spans.reshape(-1, 1, 2))
    began = time.perf_counter()
    for first in range(0, n, 128):
        part = slice(first, min(n, first + 128))
        assert store.write(
            keys[part], spans[part], sums[part], np.arange(first, part.stop, dtype=np.uint64)
        ).all()
        assert store.flush(60)
    wrote = time.perf_counter() - began
    out = np.zeros_like(pages)
    began = time.perf_counter()
    for first in range(0, n, 128):
        part = slice(first, min(n, first + 128))
        assert (store.read(keys[part], spans_of(out[part]), 60.0) == ReadStatus.HIT).all()
    read = time.perf_counter() - began
    assert (out == pages).all()
    stats = store.stats()
    assert store.close()
    return (
        stats["stored_bytes"] / stats["written_bytes"],
        pages.nbytes / wrote / 1e9,
        pages.nbytes / read / 1e9,
    )


@pytest.mark.slow
@pytest.mark.skipif(bool(_native.zstd_missing()), reason=_native.zstd_missing())
@pytest.mark.parametrize("kind", KINDS)
def test_compressed_pages_are_right_and_no_larger(tmp_path: Path, kind: str) -> None:
    content = KINDS[kind]().view(np.uint8)
    pages = np.ascontiguousarray(content[: len(content) // NBYTES * NBYTES].reshape(-1, NBYTES))
    figures: dict[str, list[tuple[float, float, float]]] = {"off": [], "zstd": []}
    for turn in range(5):
        for compression, rows in figures.items():
            rows.append(measure(tmp_path / f"{compression}-{turn}", pages, compression))
    for compression, rows in figures.items():
        ratio, wrote, read = (
            f"{np.median(column):.2f} ({min(column):.2f} to {max(column):.2f})"
            for column in zip(*rows, strict=True)
        )
        print(f"{kind}, {compression}: ratio {ratio}, write {wrote} GB/s, read {read} GB/s")
    assert np.median([row[0] for row in figures["zstd"]]) >= 1
