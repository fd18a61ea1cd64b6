"""Every metric p2pkv has, declared once; histograms in ``timings``.

``Node.counters()`` and ``/metrics`` show the same names. All series are shown from the start: who alerts on a counter
that grows sees its first step too.
"""

from p2pkv.metrics.counts import Metrics
from p2pkv.metrics.families import Family, Readings
from p2pkv.metrics.peers import BoundedPeers
from p2pkv.metrics.tables import (
    FETCH_CHOICES,
    FETCH_REASONS,
    FETCH_SECONDS,
    HEDGES,
    LABELLED,
    MISSES,
    READINGS,
)

__all__ = [
    "FETCH_CHOICES",
    "FETCH_REASONS",
    "FETCH_SECONDS",
    "HEDGES",
    "LABELLED",
    "MISSES",
    "READINGS",
    "BoundedPeers",
    "Family",
    "Metrics",
    "Readings",
]
