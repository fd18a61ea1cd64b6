"""Replay a trace against links of several speeds: fetching by measurement beside always and never.

    python -m demo.recompute TRACE --requests 4000

A line of a trace has ``input_length`` and ``hash_ids``, one for each 512 tokens, as Mooncake's traces have them. Pages
that an earlier request had are elsewhere, one in three on a disk that is a quarter as fast. Times are those of a model
and scatter by a tenth: nothing is moved and nothing computed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from p2pkv.metrics import Metrics
from p2pkv.recompute.hits import Hits
from p2pkv.recompute.policy import Policy
from p2pkv.recompute.rates import Source
from p2pkv_bench.traces import TracedRequest, read_trace

PAGE_TOKENS, PAGE_NBYTES = 512, 64 << 20
TOKEN_S, LOOK_BACK_S = 1e-4, 2e-9
"""Computing takes so many seconds a token, and so many more for each token before it."""
FIXED_S = 1e-3
"""A fetch takes so long, however few its pages are."""
SOURCES = (Source(1), Source(2, is_on_disk=True))
RATIOS = (0.1, 0.5, 1.0, 2.0, 10.0)


def main() -> None:
    """Print a table, a line for each speed of the link."""
    parser = argparse.ArgumentParser(prog="python -m demo.recompute", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=4000)
    options = parser.parse_args()
    prompts = found(itertools.islice(read_trace(options.trace), options.requests))
    print("| link beside engine | always | never | measured | of the better one |\n|---|---|---|---|---|")
    for ratio in RATIOS:
        sums = replay(prompts, ratio)
        better = min(sums["always"], sums["never"])
        figures = " | ".join(f"{sums[kind]:.0f} s" for kind in ("always", "never", "measured"))
        print(f"| {ratio:g} | {figures} | {sums['measured'] / better:.3f} |")


def found(requests: Iterable[TracedRequest]) -> list[Hits]:
    """Return the pages of each request that earlier ones had; requests without any are left out."""
    seen: set[int] = set()
    prompts = []
    for request in requests:
        ids, n_tokens = request.hash_ids, request.input_length
        whole = ids[: (n_tokens - 1) // PAGE_TOKENS]
        n = next((i for i, each in enumerate(whole) if each not in seen), len(whole))
        seen.update(ids)
        if n:
            of_page = np.array([int(each % 3 == 0) for each in whole[:n]])
            prompts.append(
                Hits(SOURCES, of_page, np.full(n, PAGE_NBYTES, np.int64), PAGE_TOKENS, 0, n_tokens)
            )
    return prompts


def replay(prompts: list[Hits], ratio: float) -> dict[str, float]:
    """Return the seconds until all tokens were there, by policy.

    Pages come ``ratio`` times as fast as they are computed.
    """
    speed = ratio * PAGE_NBYTES / (PAGE_TOKENS * TOKEN_S)
    sums = {}
    for kind in ("always", "never", "measured"):
        chance = random.Random(0)  # noqa: S311 - reproducible, not secret
        policy, total = Policy(kind, Metrics()), 0.0
        for hits in prompts:
            noise = [math.exp(chance.gauss(0, 0.1)) for _ in range(2)]
            decision = policy.decide(hits)
            n = decision.n_pages
            fetch_s = noise[0] * _fetching(hits, n, speed)
            failed = np.zeros(n, bool)
            if decision.limit_s is not None and fetch_s > decision.limit_s:
                fetch_s, failed, n = decision.limit_s, np.ones(n, bool), 0
            first = n * PAGE_TOKENS
            left = hits.n_tokens - first
            compute_s = noise[1] * left * (TOKEN_S + LOOK_BACK_S * (first + left / 2))
            if decision.n_pages:
                policy.fetched(decision, fetch_s, failed)
            policy.computed(first, left, compute_s)
            policy.settled(decision, fetch_s + compute_s)
            total += fetch_s + compute_s
        sums[kind] = total
    return sums


def _fetching(hits: Hits, n: int, speed: float) -> float:
    if not n:
        return 0.0
    nbytes = [int(hits.bytes_of(number)[n]) for number in range(len(SOURCES))]
    return FIXED_S + max(nbytes[0] / speed, nbytes[1] / (speed / 4))


if __name__ == "__main__":
    main()
