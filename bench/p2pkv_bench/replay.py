"""``python -m p2pkv_bench.replay TRACE``: the hit rate of a pool of so many pages under requests that really came.

The trace has a line of JSON a request, whose ``hash_ids`` name the pages of its prompt in order. A page that is there
is used, one that is not is published.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from p2pkv.values import parse_size
from p2pkv_bench.room import ScaledPool


def main() -> None:
    """Replay one trace and print its hit rate."""
    parser = argparse.ArgumentParser(prog="python -m p2pkv_bench.replay", description=__doc__)
    parser.add_argument("trace", type=Path, help="a line of JSON a request")
    parser.add_argument("--pages", type=int, default=10_000, help="how many the pool's memory is for")
    parser.add_argument("--page-size", default="4.5MiB", help="of one page")
    arguments = parser.parse_args()
    page_nbytes = parse_size("--page-size", arguments.page_size)
    n_asked, n_hits, share = replay(arguments.trace, arguments.pages, page_nbytes)
    print(
        f"{n_asked:,} pages asked for, {n_hits / n_asked:.2%} of them found, in memory for {arguments.pages:,} of "
        f"{arguments.page_size}; the pool is {share:.1%} full"
    )


def replay(trace: Path, n_pages: int, page_nbytes: int) -> tuple[int, int, float]:
    """Return how many pages the trace asks for, how many of them were there, and how full the pool is at its end."""
    pool = ScaledPool(n_pages * page_nbytes)
    n_asked = n_hits = 0
    with trace.open() as lines:
        for line in lines:
            names = np.array(json.loads(line)["hash_ids"], np.uint64)
            n_asked += len(names)
            # as an engine does: what is there is used, then what is missing is published, in the order of the prompt
            found = pool.contains(names)
            n_hits += int(found.sum())
            pool.publish(names, np.full(len(names), page_nbytes))
    return n_asked, n_hits, pool.share


if __name__ == "__main__":
    main()
