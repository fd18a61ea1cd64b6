"""``python -m p2pkv_bench.replay.packed TRACE``: the hit rate of a pool whose pages are of unequal sizes.

The trace has a line of JSON a request that really came, whose ``hash_ids`` name the pages of its prompt in order. A
page that is there is used, one that is not is published. With ``--ratios`` pages lie packed (docs/codec.md), each
smaller by a ratio of its own between these two, and take what the pool gives packed pages: so many granules rounded up
to 32 classes an octave.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from p2pkv.values import parse_size
from p2pkv_bench.room import GRANULE, ScaledPool, granules
from p2pkv_bench.traces import read_trace

_MIX = np.uint64(0xD1342543DE82EF95)
_CLASSES_PER_OCTAVE = 32
"""As in native/src/pool/pool_packing.cc."""


def main() -> None:
    """Replay one trace and print its hit rate."""
    parser = argparse.ArgumentParser(prog="python -m p2pkv_bench.replay.packed", description=__doc__)
    parser.add_argument("trace", type=Path, help="a line of JSON a request")
    parser.add_argument("--pages", type=int, default=10_000, help="how many the pool's memory is for")
    parser.add_argument("--page-size", default="4.5MiB", help="of one page")
    parser.add_argument("--ratios", metavar="LOW-HIGH", help="of packed pages, such as 1.29-1.33")
    arguments = parser.parse_args()
    page_nbytes = parse_size("--page-size", arguments.page_size)
    ratios = tuple(float(ratio) for ratio in arguments.ratios.split("-")) if arguments.ratios else (1.0, 1.0)
    n_asked, n_hits, share = replay(arguments.trace, arguments.pages, page_nbytes, ratios)
    print(
        f"{n_asked:,} pages asked for, {n_hits / n_asked:.2%} of them found, in memory for {arguments.pages:,} of "
        f"{arguments.page_size}; the pool is {share:.1%} full"
    )


def stored_nbytes(
    names: NDArray[np.uint64], page_nbytes: int, ratios: tuple[float, ...]
) -> NDArray[np.int64]:
    """Return what each page takes of the pool; the same for the same name."""
    low, high = ratios[0], ratios[-1]
    if high <= 1.0:
        return np.full(len(names), page_nbytes)
    scattered = ((names + np.uint64(1)) * _MIX >> np.uint64(11)).astype(np.float64) / 2**53
    n_granules = np.ceil(page_nbytes / (low + (high - low) * scattered) / GRANULE).astype(np.int64)
    octaves = 2 ** np.floor(np.log2(n_granules)).astype(np.int64)
    steps = np.maximum(1, octaves // _CLASSES_PER_OCTAVE)
    rounded = -(-n_granules // steps) * steps
    stored: NDArray[np.int64] = np.minimum(rounded, granules(page_nbytes)) * GRANULE
    return stored


def replay(
    trace: Path, n_pages: int, page_nbytes: int, ratios: tuple[float, ...] = (1.0, 1.0)
) -> tuple[int, int, float]:
    """Return how many pages the trace asks for, how many of them were there, and how full the pool is at its end."""
    pool = ScaledPool(n_pages * page_nbytes)
    n_asked = n_hits = 0
    for request in read_trace(trace):
        names = np.array(request.hash_ids, np.uint64)
        n_asked += len(names)
        # as an engine does: what is there is used, then what is missing is published, in the order of the prompt
        found = pool.contains(names)
        n_hits += int(found.sum())
        pool.publish(names, stored_nbytes(names, page_nbytes, ratios))
    return n_asked, n_hits, pool.share


if __name__ == "__main__":
    main()
