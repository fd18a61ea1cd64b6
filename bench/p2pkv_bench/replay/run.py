"""A trace through a cluster, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from p2pkv_bench.replay.placement import placement
from p2pkv_bench.replay.simulation import Cluster, Tier
from p2pkv_bench.traces import TracedRequest

_FOREVER = 1 << 62


class Size(NamedTuple):
    """Says how large a cluster is, in pages a node."""

    n_nodes: int
    pool_pages: int
    disk_pages: int


class Found(NamedTuple):
    """Counts the pages that requests asked for, and used."""

    n_asked: int
    by_tier: tuple[int, ...]
    """As many as there are :class:`Tier`."""

    @property
    def n_used(self) -> int:
        """Pages that were found, and with all before them."""
        return sum(self.by_tier)

    @property
    def rate(self) -> float:
        """The hit rate."""
        return self.n_used / self.n_asked if self.n_asked else 0.0

    def share(self, tier: Tier) -> float:
        """The part of all pages asked for that came from there."""
        return self.by_tier[tier] / self.n_asked if self.n_asked else 0.0


class Outcome(NamedTuple):
    """Holds what one replay found."""

    size: Size
    total: Found
    windows: list[Found]
    """Over equal stretches of the trace's time."""
    n_evicted: int
    """Pages that pools evicted."""


class Asks(Protocol):
    """Has nodes that can be asked, as :class:`Cluster` has."""

    def ask(self, node: int, pages: Sequence[int], /) -> Sequence[int]:
        """Ask at a node; return how many pages were used from each tier."""


def simulate(trace: Sequence[TracedRequest], size: Size, placed: str, n_windows: int = 1) -> Outcome:
    """Send the requests of ``trace`` to a simulated cluster, each to the node that the placement chooses."""
    cluster = Cluster(size.n_nodes, size.pool_pages, size.disk_pages)
    total, windows = _replay(trace, cluster, cluster, size.n_nodes, placed, n_windows)
    return Outcome(size, total, windows, cluster.n_evicted)


def beside(trace: Sequence[TracedRequest], size: Size, placed: str, other: Asks) -> tuple[Found, Found]:
    """Send the requests to a simulated cluster and to ``other``, to the same nodes; return what either found."""
    cluster = Cluster(size.n_nodes, size.pool_pages, size.disk_pages)
    simulated = [0] * len(Tier)

    class Both:
        def ask(self, node: int, pages: Sequence[int]) -> Sequence[int]:
            for tier, n in enumerate(cluster.ask(node, pages)):
                simulated[tier] += n
            return other.ask(node, pages)

    found, _ = _replay(trace, cluster, Both(), size.n_nodes, placed, 1)
    return Found(found.n_asked, tuple(simulated)), found


def ceiling(trace: Sequence[TracedRequest]) -> float:
    """Return the hit rate of a cluster that never evicts."""
    return simulate(trace, Size(1, _FOREVER, 0), "round_robin").total.rate


def _replay(
    trace: Sequence[TracedRequest], cluster: Cluster, asked: Asks, n_nodes: int, placed: str, n_windows: int
) -> tuple[Found, list[Found]]:
    place = placement(placed, n_nodes)
    began = trace[0].timestamp
    whole = trace[-1].timestamp - began or 1.0
    counts = [[0] * (1 + len(Tier)) for _ in range(n_windows)]
    for request in trace:
        pages = request.hash_ids
        used = asked.ask(place(cluster, pages), pages)
        count = counts[min(n_windows - 1, int((request.timestamp - began) / whole * n_windows))]
        count[0] += len(pages)
        for tier, n in enumerate(used, 1):
            count[tier] += n
    windows = [Found(n_asked, tuple(by_tier)) for n_asked, *by_tier in counts]
    sums = [sum(column) for column in zip(*counts, strict=True)]
    return Found(sums[0], tuple(sums[1:])), windows
