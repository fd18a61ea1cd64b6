"""Exemplars: for buckets of a histogram, the last request that is known to have fallen there.

Times are measured and counted in native code, which knows of no requests. So whoever calls on behalf of one has the
histogram looked at before and after: if exactly one observation has come meanwhile, it is that call's, with its series,
its bucket and its time. If more have come, nothing is remembered: an exemplar is a sample, and may be left out, but it
never names another's request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from p2pkv import _native

_MOST_LETTERS = 128
"""Of names and values of an exemplar's labels together, as OpenMetrics has it."""


class Exemplars:
    """The exemplars of one histogram, one a bucket at most. Thread-safe: what is replaced is replaced whole."""

    def __init__(self, histogram: _native.Timings) -> None:
        self._histogram = histogram
        self._by_series: dict[int, dict[int, str]] = {}

    def all(self) -> list[tuple[int, int, str]]:
        """Return series, bucket and what stands behind its line, of each bucket that has one."""
        return [
            (series, bucket, text)
            for series, by_bucket in self._by_series.copy().items()
            for bucket, text in by_bucket.copy().items()
        ]

    def watch(self) -> Callable[[Mapping[str, str]], None]:
        """Begin to watch one call; tell the result, when the call has ended, the labels of its request."""
        before = self._histogram.read()
        began = time.monotonic()

        def note(labels: Mapping[str, str]) -> None:
            took = time.monotonic() - began
            found = _only_one(before, self._histogram.read())
            if found is None or found[2] > took:
                return
            series, bucket, seconds = found
            kept = _fitting(labels)
            if kept:
                text = f" # {{{kept}}} {seconds!r} {time.time():.3f}"
                self._by_series.setdefault(series, {})[bucket] = text

        return note


_Reading = list[tuple[list[int], float]]


def _only_one(before: _Reading, after: _Reading) -> tuple[int, int, float] | None:
    """Return series, bucket and seconds of the one observation between two readings, if it is one."""
    found = None
    for series, ((old, old_sum), (new, new_sum)) in enumerate(zip(before, after, strict=True)):
        if old == new:
            continue
        for bucket, (earlier, later) in enumerate(zip(old, new, strict=True)):
            if later == earlier:
                continue
            if found is not None or later - earlier != 1:
                return None
            found = series, bucket, new_sum - old_sum
    return found


def _fitting(labels: Mapping[str, str]) -> str:
    """Return the labels as text, the first ones that fit."""
    left = _MOST_LETTERS
    kept = []
    for name, value in labels.items():
        left -= len(name) + len(value)
        if left < 0:
            break
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        kept.append(f'{name}="{escaped}"')
    return ",".join(kept)
