"""What the connector counts, for vLLM's log and its ``/metrics``: every metric is declared here, once."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from p2pkv.integrations.vllm_connector.installed import PromMetricsBase, StatsBase, metric_per_engine

if TYPE_CHECKING:
    from typing_extensions import Self

COUNTERS = {
    "handoffs_offered": "Requests whose KV was offered to decode",
    "handoffs_taken": "Offers that decode has taken",
    "handoffs_stowed": "Offers that nobody had taken for a while, whose blocks were copied and freed",
    "handoffs_expired": "Offers that nobody took before their lease ended",
    "handoffs_loaded": "Requests whose KV was loaded from prefill",
    "handoffs_loaded_by_layer": "Of these, those that were loaded layer by layer, within the step that needed them",
    "handoffs_failed": "Requests whose KV could not be loaded from prefill, or not all of it",
    "handoff_blocks": "Blocks loaded from prefill",
    "handoff_bytes": "Bytes loaded from prefill",
    "prefix_blocks_loaded": "Blocks loaded from the page cache",
    "prefix_blocks_missed": "Blocks that were in the page cache when asked for, and not when loaded",
    "prefix_blocks_recomputed": "Blocks that were in the page cache and were computed, because that was to be quicker",
    "prefix_blocks_published": "Blocks put into the page cache",
    "prefix_blocks_unpublished": "Blocks that could not be put into the page cache",
    "hinted_blocks_prefetched": "Blocks that were prefetched because of a KV hint, or were here already",
    "hinted_blocks_retained": "Blocks that were pinned because of a KV hint",
    "hinted_blocks_shared": "Blocks that another instance has accepted because of a KV hint",
}
"""Name and meaning; ``vllm:p2pkv_<name>_total`` in ``/metrics``. On a server of several ranks each counts its part."""

SECONDS = "handoff_seconds"
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Stats(StatsBase):
    """Counts of one interval, and how long each hand-off took; its ``data`` can be serialised."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        """Take ``data``, or nothing counted."""
        super().__init__(data={} if data is None else data)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: Self) -> Self:
        """Add what ``other`` counted, and return itself."""
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts, and the mean of the seconds, for the log."""
        counts = {name: int(self.data[name]) for name in COUNTERS if name in self.data}
        seconds: Sequence[float] = self.data.get(SECONDS, ())
        mean = {"handoff_seconds_mean": round(sum(seconds) / len(seconds), 4)} if seconds else {}
        return counts | mean

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class Tally:
    """Counts until somebody takes what was counted. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _data
        self._data: dict[str, Any] = {}

    def count(self, name: str, n: int = 1) -> None:
        """Add ``n`` to a counter of :data:`COUNTERS`."""
        if n:
            with self._lock:
                self._data[name] = self._data.get(name, 0) + n

    def took(self, seconds: float) -> None:
        """Remember how long a hand-off took."""
        with self._lock:
            self._data.setdefault(SECONDS, []).append(seconds)

    def take(self) -> Stats | None:
        """Return what was counted since the last time; None if nothing was."""
        with self._lock:
            data, self._data = self._data, {}
        return Stats(data) if data else None


class PromMetrics(PromMetricsBase):
    """The same counts in vLLM's ``/metrics``, for each engine of the server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Make the metrics of vLLM's metric classes, as it asks for."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds = {kind.__name__: made for kind, made in metric_types.items()}
        self._counters = {
            name: metric_per_engine(
                kinds["Counter"](name=f"vllm:p2pkv_{name}", documentation=meaning, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, meaning in COUNTERS.items()
        }
        self._seconds = metric_per_engine(
            kinds["Histogram"](
                name=f"vllm:p2pkv_{SECONDS}",
                documentation="Time from the start of a hand-off's load to its end",
                buckets=_BUCKETS,
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        for name, counter in self._counters.items():
            counter[engine_idx].inc(transfer_stats_data.get(name, 0))
        for seconds in transfer_stats_data.get(SECONDS, ()):
            self._seconds[engine_idx].observe(seconds)
