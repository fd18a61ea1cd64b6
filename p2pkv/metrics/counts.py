"""What a node counts itself, and all that it shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from p2pkv import _native
from p2pkv.metrics.families import Family, LabelledCounter, LabelledReadings, Readings, Values
from p2pkv.metrics.tables import (
    FETCH_CHOICES,
    FETCH_REASONS,
    FETCH_SECONDS,
    LABELLED,
    MISSES,
    PREFETCH_OUTCOMES,
    READINGS,
)
from p2pkv.metrics.working_set import WorkingSet
from p2pkv.timings import Timings


class Metrics:
    """The counters of one node, of which several fit in a process. Thread-safe."""

    def __init__(self) -> None:
        self._own: list[tuple[str, str, tuple[str, ...], LabelledCounter]] = []
        self._read: list[Readings] = []
        self._read_labelled: list[LabelledReadings] = []
        self.timings = Timings()
        self.working_set = WorkingSet()
        self.missed_pages = self._labelled(
            "p2pkv_missed_pages", "Pages asked for and not delivered", "reason"
        )
        """``reason``: :data:`MISSES`; device, not copied to it; host, nobody has told an attached engine of bumps."""
        self.published_pages = self._counter("p2pkv_published_pages", "Pages published")
        self.published_bytes = self._counter("p2pkv_published_bytes", "Bytes of pages copied into the pool")
        self.unpublished_pages = self._labelled(
            "p2pkv_unpublished_pages", "Pages that could not be published", "reason"
        )
        """``reason``: no_room, no_directory, timed_out, epoch, draining; changed, while it was packed; device, not
        copied from it or not in time; host, that an attached engine has no node to publish to."""
        self.told_touches = self._counter(
            "p2pkv_told_touches",
            "Pages read from other nodes that these were told of, so that they keep them",
        )
        self.prefetched_pages = self._labelled(
            "p2pkv_prefetched_pages", "Pages of prefetches and of hand-overs from others", "outcome"
        )
        """``outcome``: those of :class:`~p2pkv.PrefetchOutcome`."""
        self.prefetched_bytes = self._counter(
            "p2pkv_prefetched_bytes", "Bytes of pages brought from other nodes into the pool"
        )
        self.hot_pages = self._labelled(
            "p2pkv_hot_pages",
            "Pages fetched often from others that were to be brought into the pool",
            "outcome",
        )
        """``outcome``: those of :class:`~p2pkv.PrefetchOutcome`; no_room: beyond the share or the rate too."""
        self.hot_bytes = self._counter(
            "p2pkv_hot_bytes", "Bytes of such pages that were brought into the pool"
        )
        self.cooled_guests = self._counter(
            "p2pkv_cooled_guests", "Such pages taken out of the pool because they were fetched seldom"
        )
        self.handed_over_pages = self._labelled(
            "p2pkv_handed_over_pages", "Pages that another node was asked to prefetch", "outcome"
        )
        """``outcome``: accepted, refused."""
        self.drained_pages = self._labelled(
            "p2pkv_drained_pages", "Pages that this node had when it began to drain", "outcome"
        )
        """``outcome``: handed_over; left, nobody had room or time; gone, evicted or taken back meanwhile."""
        self.adopted_pages = self._counter(
            "p2pkv_adopted_pages", "Pages of nodes that have drained that are this node's own since"
        )
        self.pinned_pages = self._labelled("p2pkv_pinned_pages", "Pages that calls asked to pin", "outcome")
        """``outcome``: pinned, absent, no_room."""
        self.recompute_decisions = self._labelled(
            "p2pkv_recompute_decisions",
            "Prompts with pages elsewhere: what was decided, and why",
            "choice",
            "reason",
        )
        """``choice``: :data:`FETCH_CHOICES`; ``reason``: :data:`FETCH_REASONS`."""
        for choice, reason in product(FETCH_CHOICES, FETCH_REASONS):
            self.recompute_decisions.labels(choice, reason)
        self.recompute_pages = self._labelled(
            "p2pkv_recompute_pages", "Pages elsewhere that were to be fetched, or computed anew", "choice"
        )
        """``choice``: fetched, recomputed."""
        self.recompute_seconds = self._labelled(
            "p2pkv_recompute_seconds", "Seconds until the tokens of such prompts were there", "figure"
        )
        """``figure``: :data:`FETCH_SECONDS`."""
        self.unheard_take_backs = self._counter(
            "p2pkv_unheard_take_backs",
            "Times a node with pages of this one did not say in time that it took them out",
        )
        self.staged_bytes = self._labelled(
            "p2pkv_staged_bytes",
            "Bytes of pages copied between device memory and its staging",
            "direction",
        )
        """``direction``: to_device, to_host."""
        self.device_direct_bytes = self._labelled(
            "p2pkv_device_direct_bytes",
            "Bytes of pages that devices copied from, or to, where they lie in a pool of this host",
            "direction",
        )
        """``direction``: to_device, to_host."""
        self.refused_device_memories = self._labelled(
            "p2pkv_refused_device_memories",
            "Registrations of device memory that a transport which reads devices could not have: its rows are staged",
            "transport",
        )
        self.indexer_requests = self._labelled(
            "p2pkv_indexer_requests", "Requests to this node's indexer", "outcome"
        )
        """``outcome``: answered, refused, failed."""
        self.looked_up_pages = LabelledCounter()
        """As :data:`LABELLED` says; native code counts those that the location cache knew, so that they are shown
        together."""
        self.found_pages = self._counter(
            "p2pkv_found_pages", "Of the pages that peers were asked for, those that somebody has"
        )
        self.retracted_pages = self._counter(
            "p2pkv_retracted_pages", "Evicted pages taken back from the directory"
        )
        self.reannounced_pages = self._counter(
            "p2pkv_reannounced_pages", "Pages put again after the cluster changed"
        )
        self.mended_entries = self._counter(
            "p2pkv_mended_entries", "Directory entries that their owners lacked and were given again"
        )
        self.transport_fallbacks = self._labelled(
            "p2pkv_transport_fallbacks",
            "Times a peer was not reached over the preferred transport",
            "transport",
        )
        self.silent_owners = self._counter(
            "p2pkv_silent_owners", "Directory requests a healthy owner did not answer in time"
        )
        self.failed_calls = self._labelled(
            "p2pkv_failed_calls",
            "Calls of a serving engine answered with misses because of an error",
            "operation",
            "cause",
        )
        """``operation``: exists, get, set, clear, register and the like. ``cause``: the class of the error."""
        self.engine_failures = self._counter(
            "p2pkv_engine_failures", "All of p2pkv_failed_calls_total: there from the start, for alerts"
        )
        for counter, values in (
            (self.missed_pages, (*MISSES, "device", "host")),
            (
                self.unpublished_pages,
                ("no_room", "no_directory", "timed_out", "epoch", "changed", "draining", "device", "host"),
            ),
            (self.staged_bytes, ("to_device", "to_host")),
            (self.device_direct_bytes, ("to_device", "to_host")),
            (self.looked_up_pages, ("own_shard", "peers", "earlier_owners", "holders")),
            (self.indexer_requests, ("answered", "refused", "failed")),
            (self.prefetched_pages, PREFETCH_OUTCOMES),
            (self.hot_pages, PREFETCH_OUTCOMES),
            (self.handed_over_pages, ("accepted", "refused")),
            (self.drained_pages, ("handed_over", "left", "gone")),
            (self.pinned_pages, ("pinned", "absent", "no_room")),
            (self.recompute_pages, ("fetched", "recomputed")),
            (self.recompute_seconds, FETCH_SECONDS),
        ):
            self._show(counter, values)

    def _counter(self, name: str, help_text: str) -> _native.Counter:
        return self._labelled(name, help_text).labels()

    def _labelled(self, name: str, help_text: str, *labels: str) -> LabelledCounter:
        counter = LabelledCounter()
        self._own.append((f"{name}_total", help_text, labels, counter))
        return counter

    def _show(self, counter: LabelledCounter, values: Iterable[str]) -> None:
        for value in values:
            counter.labels(value)

    def show_transports(self, names: Iterable[str]) -> None:
        """Show what is counted by transport for these, which the node has."""
        for counter in (self.transport_fallbacks, self.refused_device_memories):
            self._show(counter, names)

    def count(self, counter: LabelledCounter, label: str, n: int) -> None:
        """Add ``n`` under a counter's only label."""
        if n:
            known = counter.series.get((label,))
            (counter.labels(label) if known is None else known).inc(n)

    def watch(self, read: Readings) -> None:
        """Show what ``read`` returns, by the names of :data:`READINGS`, whenever the metrics are asked for."""
        self._read.append(read)

    def watch_labelled(self, read: LabelledReadings) -> None:
        """Show what ``read`` returns, by the names of :data:`LABELLED`, whenever the metrics are asked for."""
        self._read_labelled.append(read)

    def families(self) -> Iterator[Family]:
        """Yield all that is shown but histograms; each part of the node is asked when its turn comes."""
        for name, help_text, labels, counter in self._own:
            yield Family(name, help_text, labels, counter.values())
        for read in self._read:
            for name, value in read().items():
                yield Family(name, READINGS[name], (), {(): value})
        for read_labelled in self._read_labelled:
            for name, by_labels in read_labelled().items():
                yield Family(name, *LABELLED[name], by_labels)

    def counters(self) -> dict[str, float]:
        """Return every counter by its name, labels in braces: ``p2pkv_fetched_pages_total{source="disk"}``.

        Of histograms those series that have seen something.
        """
        out: dict[str, float] = {}
        for family in self.families():
            for values, value in family.values.items():
                labels = ",".join(
                    [f'{key}="{text}"' for key, text in zip(family.labels, values, strict=True)]
                )
                out[f"{family.name}{{{labels}}}" if labels else family.name] = float(value)
        for timing in self.timings.all():
            out.update(timing.counters())
        return out

    def looked_up(self) -> Values:
        """Return the pages looked up so far by source, those excepted that the location cache knew."""
        return self.looked_up_pages.values()
