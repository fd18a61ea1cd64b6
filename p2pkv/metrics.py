"""Every metric p2pkv has, declared once. ``Node.counters()`` and ``/metrics`` show the same names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

READINGS = {
    "p2pkv_members": "Nodes in the view, alive or suspected",
    "p2pkv_alone": "1 while this node knows no other, although join names some",
    "p2pkv_expelled": "1 on a node that is no member, as long as another has its id",
    "p2pkv_pool_capacity_bytes": "Room for pages",
    "p2pkv_pool_used_bytes": "Bytes of allocated blocks",
    "p2pkv_pool_pinned_bytes": "Bytes of blocks held by pins",
    "p2pkv_pool_pages": "Committed pages",
    "p2pkv_pins_bytes": "Bytes of blocks held by pins that calls asked for",
    "p2pkv_guest_pages": "Pages of other nodes in the pool",
    "p2pkv_taken_back_guests_total": "Pages of other nodes taken out because these took them back",
    "p2pkv_lost_sources_total": "Times all pages of a node were taken out, for word of it had been missed",
    "p2pkv_followers": "Nodes that have asked to be told what this one takes back",
    "p2pkv_prefetches": "Prefetches that wait or are under way",
    "p2pkv_stored_pages_total": "Pages copied into the pool",
    "p2pkv_evicted_pages_total": "Pages evicted or purged from the pool",
    "p2pkv_no_room_pages_total": "Pages the pool had no room for",
    "p2pkv_dropped_evictions_total": "Evictions the directory was not told of: their entries cost a miss each",
    "p2pkv_packing": "1 while published pages are packed where they get smaller",
    "p2pkv_packed_pages_total": "Pages published that lie in the pool packed",
    "p2pkv_packing_bytes_total": "Bytes of the published pages that packing was tried on",
    "p2pkv_packing_stored_bytes_total": "Bytes of the pool that these took",
    "p2pkv_packing_seconds_total": "Seconds that threads looked at these pages and packed them",
    "p2pkv_shard_entries": "Live entries of this node's shard",
    "p2pkv_shard_tombstones": "Dropped entries kept against late messages",
    "p2pkv_shard_bytes": "Memory of this node's shard",
    "p2pkv_control_requests_total": "Requests this node's control socket took",
    "p2pkv_directory_requests_total": "Requests peers sent this node's shard over channels",
    "p2pkv_directory_channels": "Channels peers have to this node's shard",
    "p2pkv_malformed_requests_total": "Requests that no node could have sent",
    "p2pkv_dropped_events_total": "Handshakes and views overtaken before Python took them",
    "p2pkv_refused_strangers_total": "Connections with a wrong key, or none",
    "p2pkv_namespace_epoch": "When this node's namespace was bumped last, in nanoseconds; 0: never",
    "p2pkv_bumps_total": "Bumps of its namespace that this node has heard of",
    "p2pkv_kv_event_batches_total": "Messages of KV events sent",
    "p2pkv_kv_event_retellings_total": "Times that KV events told all: at start, after a bump or a loss, when asked",
    "p2pkv_membership_malformed_views_total": "Views that no node could have sent",
    "p2pkv_membership_late_rounds_total": "Rounds that came too late to suspect anybody",
    "p2pkv_membership_suspicions_total": "Nodes suspected",
    "p2pkv_membership_deaths_total": "Nodes declared dead",
    "p2pkv_membership_failures_total": "Turns of the membership engine that failed",
    "p2pkv_membership_refused_clusters_total": "Views and news of nodes of another cluster",
    "p2pkv_membership_cut_views_total": "Views that did not fit a message, and were told in part",
    "p2pkv_membership_reboots_total": "Boot epochs taken after the start, above one that the cluster knew",
    "p2pkv_membership_refused_records_total": "Records of members that were not believed",
    "p2pkv_disk_capacity_bytes": "Room of the disk tier",
    "p2pkv_disk_used_bytes": "Bytes the disk tier's folder occupies at most",
    "p2pkv_disk_pages": "Pages on disk",
    "p2pkv_disk_queued_bytes": "Bytes of pages that wait to be written to disk",
    "p2pkv_disk_suspended": "1 while the disk can't be used: the node works from memory",
    "p2pkv_disk_stored_pages_total": "Pages written to disk",
    "p2pkv_disk_stored_bytes_total": "Bytes of pages written to disk",
    "p2pkv_disk_written_bytes_total": "The same as they are there: fewer where they are compressed",
    "p2pkv_disk_known_pages_total": "Pages not written because they were on disk already",
    "p2pkv_disk_skipped_pages_total": "Pages left for later: the disk's queue was full, or the pool's pins used up",
    "p2pkv_disk_caught_up_pages_total": "Of these, pages that the disk has taken later",
    "p2pkv_disk_behind_pages": "Of these, pages that wait for the disk to have time",
    "p2pkv_disk_refused_pages_total": "Pages the disk did not take: its queue was full, or it was suspended",
    "p2pkv_disk_changed_pages_total": "Pages not written because their bytes were gone by their turn",
    "p2pkv_disk_lost_pages_total": "Pages the disk took and failed to write",
    "p2pkv_disk_evicted_pages_total": "Pages evicted from disk",
    "p2pkv_disk_read_pages_total": "Pages read from disk, for this node's calls and for promotions",
    "p2pkv_disk_read_bytes_total": "Bytes of pages read from disk",
    "p2pkv_disk_bad_records_total": "Pages on disk that failed a check and were dropped",
    "p2pkv_disk_timed_out_pages_total": "Pages the disk did not bring in time",
    "p2pkv_disk_recovered_pages_total": "Pages found on disk that an earlier run had left",
    "p2pkv_disk_suspensions_total": "Times the disk could not be used any more",
    "p2pkv_disk_failed_opens_total": "Attempts to open the disk tier that failed",
    "p2pkv_promoted_pages_total": "Pages brought back from disk into the pool",
    "p2pkv_promoted_bytes_total": "Bytes of pages brought back from disk into the pool",
    "p2pkv_unpromoted_pages_total": "Pages asked for that could not be brought back",
    "p2pkv_unwarmed_pages_total": "Pages of an exists that were not loaded ahead: others would have had to go for them",
    "p2pkv_late_promotions_total": "Pages asked for that were not back when the answer was due",
    "p2pkv_transfer_links": "Connections to peers for transfers",
    "p2pkv_open_offers": "Offers of this node that are valid",
    "p2pkv_offers_total": "Offers made by this node",
    "p2pkv_taken_rows_total": "Rows of this node's offers that receivers have",
    "p2pkv_taken_bytes_total": "Bytes of rows of this node's offers that receivers have",
    "p2pkv_withdrawn_offers_total": "Offers withdrawn before they were taken, by a call or at its deadline",
    "p2pkv_lapsed_offers_total": "Offers whose lease ended before they were taken",
    "p2pkv_late_pulls_total": "Pulls reported after their offer had ended: the receiver dropped the bytes",
    "p2pkv_gone_asks_total": "Requests to get rows whose offer was over, refused at once",
    "p2pkv_refused_asks_total": "Requests to get rows that were not remembered, because peers ask for too many at once",
    "p2pkv_staged_to_host_bytes_total": "Bytes of offers copied from devices to page-locked memory, for peers to read",
    "p2pkv_outgoing_staging_used_bytes": "Bytes of page-locked memory that hold offered rows of devices",
    "p2pkv_staged_to_device_bytes_total": "Bytes of pulled rows copied from page-locked memory to devices",
    "p2pkv_incoming_staging_used_bytes": "Bytes of page-locked memory that rows for devices are pulled into",
    "p2pkv_open_grants": "Grants and gets under way",
    "p2pkv_pulled_bytes_total": "Bytes pulled from peers' offers, and proven",
    "p2pkv_granted_rows_total": "Rows pulled straight to where they were granted",
    "p2pkv_buffered_rows_total": "Rows pulled into the receive buffer",
    "p2pkv_pooled_rows_total": "Rows pulled into the buddy pool, because the receive buffer was full",
    "p2pkv_parked_offers_total": "Offers that wait with their producer, because there was no room",
    "p2pkv_refused_offers_total": "Offers that were not remembered, because too many wait already",
    "p2pkv_claimed_rows_total": "Rows copied from the receive buffer or the buddy pool to where they were granted",
    "p2pkv_rejected_rows_total": "Rows whose offer was withdrawn while they were pulled",
    "p2pkv_failed_rows_total": "Rows that could not be pulled",
    "p2pkv_duplicate_rows_total": "Rows refused because they had come already",
    "p2pkv_expired_rows_total": "Rows dropped because nobody claimed them in time",
    "p2pkv_transfer_fallbacks_total": "Times a peer's memory was not reached over the preferred transport",
    "p2pkv_receive_buffer_used_bytes": "Bytes of the receive buffer that hold rows",
    "p2pkv_buddy_pool_used_bytes": "Bytes of the buddy pool that hold rows",
    "p2pkv_buddy_pool_pinned": "1 if the buddy pool is locked in memory",
    "p2pkv_device_staging_bytes": "Page-locked host memory that bytes of devices go through",
    "p2pkv_device_staging_used_bytes": "Bytes of it that calls have, or that were lost",
    "p2pkv_device_staging_lost_bytes": "Bytes of it never used again, because a lost device might still write there",
}
"""What is read from the parts when asked; names in ``_total`` only grow."""


class _Readings(Collector):
    """Shows what ``read`` returns under the names of :data:`READINGS`."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        for name, value in self._read().items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(name.removesuffix("_total"), READINGS[name], value=value)


class _Sources(Collector):
    """Shows the counters by source that native code counts, and what Python adds to one of them."""

    _HELP: ClassVar = {
        "p2pkv_fetched_pages_total": "Pages fetched",
        "p2pkv_fetched_bytes_total": "Bytes of pages fetched",
        "p2pkv_looked_up_pages_total": "Pages looked up",
    }
    """``source`` of what is fetched: own_pool, disk, or the transport that brought it."""

    def __init__(self, looked_up: Counter) -> None:
        self.read: Callable[[], Mapping[str, Mapping[str, float]]] = dict
        """Values by metric and source."""
        self._looked_up = looked_up

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        by_metric = {name: dict(values) for name, values in self.read().items()}
        for sample in next(iter(self._looked_up.collect())).samples:
            if sample.name in self._HELP:
                by_metric.setdefault(sample.name, {})[sample.labels["source"]] = sample.value
        for name, values in by_metric.items():
            family = CounterMetricFamily(name.removesuffix("_total"), self._HELP[name], labels=("source",))
            for source, value in values.items():
                if value:  # what never counted anything does not show
                    family.add_metric((source,), value)
            yield family


class _Copies(Collector):
    """Shows which kernels copy, 1 for each that is in force, and how many large batches how many threads copied."""

    def __init__(
        self,
        read_kernels: Callable[[], Mapping[tuple[str, str, str], float]],
        read_large: Callable[[], Mapping[int, float]],
    ) -> None:
        self._read_kernels = read_kernels
        self._read_large = read_large

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "p2pkv_copy_kernel_info",
            "What copies page bytes in this process, by the size of a copy",
            labels=("operation", "size_class", "kernel"),
        )
        for labels, value in self._read_kernels().items():
            family.add_metric(labels, value)
        yield family
        large = CounterMetricFamily(
            "p2pkv_large_copies",
            "Batches of 2 MiB and more that this process copied",
            labels=("threads",),
        )
        for n_threads, n_batches in self._read_large().items():
            large.add_metric((str(n_threads),), n_batches)
        yield large


class Metrics:
    """The counters of one node, in a registry of its own so that several nodes fit in a process. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.missed_pages = self._counter("p2pkv_missed_pages", "Pages asked for and not delivered", "reason")
        """``reason``: not_found, rejected, peer_lost, timed_out, checksum; not_promoted, still on a peer's disk;
        unreadable, it came packed and can't be unpacked; device, not copied to it."""
        self.published_pages = self._counter("p2pkv_published_pages", "Pages published")
        self.published_bytes = self._counter("p2pkv_published_bytes", "Bytes of pages copied into the pool")
        self.unpublished_pages = self._counter(
            "p2pkv_unpublished_pages", "Pages that could not be published", "reason"
        )
        """``reason``: no_room, no_directory, timed_out; device, not copied from it or not in time."""
        self.prefetched_pages = self._counter(
            "p2pkv_prefetched_pages", "Pages of prefetches and of hand-overs from others", "outcome"
        )
        """``outcome``: those of :class:`~p2pkv.PrefetchOutcome`."""
        self.prefetched_bytes = self._counter(
            "p2pkv_prefetched_bytes", "Bytes of pages brought from other nodes into the pool"
        )
        self.handed_over_pages = self._counter(
            "p2pkv_handed_over_pages", "Pages that another node was asked to prefetch", "outcome"
        )
        """``outcome``: accepted, refused."""
        self.pinned_pages = self._counter("p2pkv_pinned_pages", "Pages that calls asked to pin", "outcome")
        """``outcome``: pinned, absent, no_room."""
        self.unheard_take_backs = self._counter(
            "p2pkv_unheard_take_backs",
            "Times a node with pages of this one did not say in time that it took them out",
        )
        self.staged_bytes = self._counter(
            "p2pkv_staged_bytes",
            "Bytes of pages copied between device memory and its staging",
            "direction",
        )
        """``direction``: to_device, to_host."""
        self.looked_up_pages = Counter("p2pkv_looked_up_pages", "Pages looked up", ["source"], registry=None)
        """``source``: own_shard, peers, earlier_owners (what newcomers did not know); native code counts those that
        the location cache knew, so that they are shown together."""
        self._sources = _Sources(self.looked_up_pages)
        self.registry.register(self._sources)
        self.retracted_pages = self._counter(
            "p2pkv_retracted_pages", "Evicted pages taken back from the directory"
        )
        self.reannounced_pages = self._counter(
            "p2pkv_reannounced_pages", "Pages put again after the cluster changed"
        )
        self.mended_entries = self._counter(
            "p2pkv_mended_entries", "Directory entries that their owners lacked and were given again"
        )
        self.transport_fallbacks = self._counter(
            "p2pkv_transport_fallbacks",
            "Times a peer was not reached over the preferred transport",
            "transport",
        )
        self.silent_owners = self._counter(
            "p2pkv_silent_owners", "Directory requests a healthy owner did not answer in time"
        )
        self.failed_calls = self._counter(
            "p2pkv_failed_calls",
            "Calls of a serving engine answered with misses because of an error",
            "operation",
            "cause",
        )
        """``operation``: exists, get, set, clear, register. ``cause``: the class of the error."""
        # Looking a label up takes several times as long as counting.
        self._children: dict[tuple[Counter, str], Counter] = {}

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def count(self, counter: Counter, label: str, n: int) -> None:
        """Add ``n`` under a counter's only label; a label that never counted anything does not show."""
        if n:
            child = self._children.get((counter, label))
            if child is None:
                child = self._children[counter, label] = counter.labels(label)
            child.inc(n)

    def counters(self) -> dict[str, float]:
        """Return every counter by its name, labels in braces: ``p2pkv_fetched_pages_total{source="disk"}``."""
        out: dict[str, float] = {}
        for metric in self.registry.collect():
            for sample in metric.samples:
                if sample.name.endswith("_created"):
                    continue
                labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                out[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return out

    def watch(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Show what ``read`` returns, by the names of :data:`READINGS`, whenever the metrics are asked for."""
        self.registry.register(_Readings(read))

    def watch_sources(self, read: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Show what ``read`` returns, by metric and source; it is called whenever the metrics are asked for."""
        self._sources.read = read

    def watch_copies(
        self,
        read_kernels: Callable[[], Mapping[tuple[str, str, str], float]],
        read_large: Callable[[], Mapping[int, float]],
    ) -> None:
        """Show the operations, size classes and kernels in force, and large batches by their number of threads."""
        self.registry.register(_Copies(read_kernels, read_large))
