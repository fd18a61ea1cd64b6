"""What native code has counted of fetches, by the names of the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv import _native
from p2pkv.metrics import HEDGES, Metrics


class FetchCounts:
    """Thread-safe; the metrics ask it at each scrape."""

    def __init__(self, sources: _native.FetchSources, names: Sequence[str], metrics: Metrics) -> None:
        """``names`` are those of the sources, in their order."""
        self._sources = sources
        self._names = names
        self._metrics = metrics
        metrics.watch_labelled(self._by_source)

    @property
    def n_fetched(self) -> int:
        """Pages that calls have found so far, wherever they came from."""
        return sum(n_pages for n_pages, _ in self._sources.fetched())

    @property
    def n_hosts_guests(self) -> int:
        """Pages of other nodes that calls found in the pool of this host's node, if this is an engine of it."""
        return self._sources.checks()["hosts_guests"]

    def _by_source(self) -> dict[str, dict[tuple[str, ...], float]]:
        fetched = dict(zip(self._names, self._sources.fetched(), strict=True))
        return {
            "p2pkv_fetched_pages_total": {(source,): n_pages for source, (n_pages, _) in fetched.items()},
            "p2pkv_fetched_bytes_total": {(source,): nbytes for source, (_, nbytes) in fetched.items()},
            "p2pkv_hedged_reads_total": {
                (why,): n_reads for why, n_reads in zip(HEDGES, self._sources.hedges(), strict=True)
            },
            "p2pkv_looked_up_pages_total": {
                ("location_cache",): self._sources.n_located,
                **self._metrics.looked_up(),
            },
        }

    def readings(self) -> dict[str, float]:
        """Return what has no labels."""
        checks = self._sources.checks()
        return {
            "p2pkv_rejected_reads_total": checks["rejected"],
            "p2pkv_damaged_reads_total": checks["checksum"],
            "p2pkv_late_fetches_total": checks["late_calls"],
        }
