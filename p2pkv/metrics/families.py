"""What a metric is when it is shown, and the counters that Python adds to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from p2pkv import _native

Values = Mapping[tuple[str, ...], float]
"""Values of a metric by the values of its labels, in the order in which these are named."""

Readings = Callable[[], Mapping[str, float]]
LabelledReadings = Callable[[], Mapping[str, Values]]


class Family(NamedTuple):
    """A metric with all of its series. Its name ends in ``_total`` if it only grows."""

    name: str
    help: str
    labels: tuple[str, ...]
    values: Values


class LabelledCounter:
    """A counter with labels, each series of which is native: adding takes no lock. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while a series is added
        self.series: dict[tuple[str, ...], _native.Counter] = {}
        """All that are shown. For reading: whoever has added one may keep it, which spares looking it up."""

    def labels(self, *values: str) -> _native.Counter:
        """Return the series of these labels, which is shown from now on."""
        with self._lock:
            return self.series.setdefault(values, _native.Counter())

    def values(self) -> Values:
        """Return what was counted so far."""
        return {labels: counter.value for labels, counter in self.series.copy().items()}
