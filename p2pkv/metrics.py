"""Every metric p2pkv has, declared once; histograms in `timings`.

``Node.counters()`` and ``/metrics`` show the same names.

Labels have few values, all of which are known beforehand and shown from the start: who alerts on a counter that grows
sees its first step too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pkv.timings import Timings

READINGS = {
    "p2pkv_members": "Nodes in the view, alive or suspected",
    "p2pkv_suspects": "Nodes in the view that are suspected",
    "p2pkv_start_time_seconds": "When this node was started, in seconds since 1970",
    "p2pkv_ring_share_ratio": "Part of all entries of the directory that this node is the first owner of",
    "p2pkv_draining": "1 since this node has begun to hand its pages over, to leave",
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
    "p2pkv_pool_next_out_age_seconds": "Age of the page that is evicted next, as far as remembered; 0: no pages",
    "p2pkv_untold_evictions": "Evictions that wait for the directory to be told of them",
    "p2pkv_stored_pages_total": "Pages copied into the pool",
    "p2pkv_evicted_pages_total": "Pages evicted or purged from the pool",
    "p2pkv_no_room_pages_total": "Pages the pool had no room for",
    "p2pkv_dropped_evictions_total": "Evictions the directory was not told of: their entries cost a miss each",
    "p2pkv_packing": "1 while published pages are packed where they get smaller",
    "p2pkv_packed_pages_total": "Pages published that lie in the pool packed",
    "p2pkv_packing_bytes_total": "Bytes of the published pages that packing was tried on",
    "p2pkv_packing_stored_bytes_total": "Bytes of the pool that these took",
    "p2pkv_packing_seconds_total": "Seconds that threads looked at these pages and packed them",
    "p2pkv_rejected_reads_total": "Reads of pages that were others by then; a second look-up makes up for most",
    "p2pkv_damaged_reads_total": "Reads whose bytes had another checksum than what was published",
    "p2pkv_late_fetches_total": "Fetches that missed pages because their time was over",
    "p2pkv_namespace_peers": "Peers with this node's namespace, as of when nothing was found with any",
    "p2pkv_fruitless_look_ups_total": "Pages asked of peers while no page was found with any, in rounds of that kind",
    "p2pkv_shard_entries": "Live entries of this node's shard",
    "p2pkv_shard_tombstones": "Dropped entries kept against late messages",
    "p2pkv_shard_bytes": "Memory of this node's shard",
    "p2pkv_control_requests_total": "Requests this node's control socket took",
    "p2pkv_directory_requests_total": "Requests peers sent this node's shard over channels",
    "p2pkv_directory_channels": "Channels peers have to this node's shard",
    "p2pkv_control_queued_requests": "Requests that wait for this node's interpreter",
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
    "p2pkv_registry_up": "1 while the store of members' records answers, 0 while the last known ones are used",
    "p2pkv_registry_records": "Members' records in the store that this node can read",
    "p2pkv_registry_lists_total": "Times that all records were read: at the start, and after whatever may be missed",
    "p2pkv_registry_failures_total": "Calls to the store of members' records that failed",
    "p2pkv_registry_lost_records_total": "Times that this node's own record was gone, and was written again",
    "p2pkv_registry_refused_records_total": "Records in the store that were not made with the cluster's secret",
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

LABELLED = {
    "p2pkv_build_info": ("What this node is: 1", ("version", "node_id", "cluster", "namespace")),
    "p2pkv_copy_kernel_info": (
        "What copies page bytes in this process, by the size of a copy",
        ("operation", "size_class", "kernel"),
    ),
    "p2pkv_large_copies_total": ("Batches of 2 MiB and more that this process copied", ("threads",)),
    "p2pkv_fetched_pages_total": ("Pages fetched", ("source",)),
    "p2pkv_fetched_bytes_total": ("Bytes of pages fetched", ("source",)),
    "p2pkv_looked_up_pages_total": ("Pages looked up", ("source",)),
    "p2pkv_peer_read_pages_total": ("Pages read from a peer", ("peer", "transport")),
    "p2pkv_peer_read_bytes_total": ("Bytes of pages read from a peer", ("peer", "transport")),
    "p2pkv_rail_bytes_total": ("Bytes of pages read over a rail", ("transport", "rail")),
    "p2pkv_rail_retried_bytes_total": (
        "Bytes asked for over a rail, and again over another",
        ("transport", "rail"),
    ),
    "p2pkv_rail_failures_total": (
        "Connections of a rail that were suspected or given up",
        ("transport", "rail", "reason"),
    ),
}
"""The same with labels. ``source`` of what is fetched: own_pool, disk, or the transport that brought it; of what is
looked up: own_shard, location_cache, peers, earlier_owners (what newcomers did not know). ``peer``: the first 32 nodes
that were read from, and ``others``."""

MISSES = ("not_found", "rejected", "peer_lost", "timed_out", "checksum", "not_promoted", "unreadable")
"""Why a fetch misses a page, in the order of ``FetchBatch::Miss``. rejected: it was another page by then;
not_promoted: it is still on a peer's disk; unreadable: it came packed and can't be unpacked."""

PREFETCH_OUTCOMES = (
    "present",
    "brought",
    "not_found",
    "not_owned",
    "not_read",
    "no_room",
    "taken_back",
    "timed_out",
    "canceled",
    "refused",
)
"""What becomes of a page of a prefetch, as :class:`~p2pkv.PrefetchOutcome` names it."""

FETCH_CHOICES = ("fetch_all", "fetch_part", "recompute")
FETCH_REASONS = ("setting", "unmeasured", "quicker", "waits", "probe")
"""What was decided of a prompt's pages, and why, as ``p2pkv/recompute/policy.py`` names it."""
FETCH_SECONDS = ("predicted", "real", "always", "never", "regret")
"""Until the tokens of prompts were there: as expected, as it was, as it would have been had all pages been fetched, or
none, as far as is known; and by how much the real time was above the better of these two."""

_MOST_PEERS = 32
_PEERS_REMEMBERED = 4096
"""Beyond it who was gone longest is taken for new if it comes back with what it had; a guess, never met."""

Readings = Callable[[], Mapping[str, float]]
LabelledReadings = Callable[[], Mapping[str, Mapping[tuple[str, ...], float]]]


class _Readings(Collector):
    """Shows what ``read`` returns under the names of :data:`READINGS`."""

    def __init__(self, read: Readings) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        for name, value in self._read().items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(name.removesuffix("_total"), READINGS[name], value=value)


class _Labelled(Collector):
    """Shows what ``read`` returns, by metric and labels, under the names of :data:`LABELLED`."""

    def __init__(self, read: LabelledReadings) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        for name, by_labels in self._read().items():
            help_text, labels = LABELLED[name]
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name.removesuffix("_total"), help_text, labels=labels)
            for values, value in by_labels.items():
                family.add_metric(values, value)
            yield family


class Traffic(Protocol):
    """What was read from one peer over one transport."""

    node_id: str
    transport: str
    n_pages: int
    nbytes: int


class BoundedPeers:
    """Gives the first peers a series of their own for good, and the others one together. Thread-safe.

    Its counters never shrink, though a peer that comes back begins at nothing.
    """

    def __init__(self, traffic: Callable[[], Iterable[Traffic]]) -> None:
        self._traffic = traffic
        self._lock = threading.Lock()  # guards all below
        self._named: set[str] = set()
        self._last: dict[tuple[str, str], tuple[int, int]] = {}
        self._pages: dict[tuple[str, ...], float] = {}
        self._bytes: dict[tuple[str, ...], float] = {}

    def read(self) -> Mapping[str, Mapping[tuple[str, ...], float]]:
        """Return what was read from peers so far, those who are gone included."""
        with self._lock:
            for peer in self._traffic():
                self._add(peer)
            while len(self._last) > _PEERS_REMEMBERED:
                del self._last[next(iter(self._last))]
            return {
                "p2pkv_peer_read_pages_total": dict(self._pages),
                "p2pkv_peer_read_bytes_total": dict(self._bytes),
            }

    def _add(self, peer: Traffic) -> None:
        if len(self._named) < _MOST_PEERS:
            self._named.add(peer.node_id)
        before = self._last.pop((peer.node_id, peer.transport), (0, 0))
        if peer.n_pages < before[0]:
            before = (0, 0)
        self._last[peer.node_id, peer.transport] = (peer.n_pages, peer.nbytes)
        labels = (peer.node_id if peer.node_id in self._named else "others", peer.transport)
        self._pages[labels] = self._pages.get(labels, 0) + peer.n_pages - before[0]
        self._bytes[labels] = self._bytes.get(labels, 0) + peer.nbytes - before[1]


class Metrics:
    """The counters of one node, in a registry of its own so that several nodes fit in a process. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.timings = Timings()
        self.missed_pages = self._counter("p2pkv_missed_pages", "Pages asked for and not delivered", "reason")
        """``reason``: :data:`MISSES`; device, not copied to it."""
        self.published_pages = self._counter("p2pkv_published_pages", "Pages published")
        self.published_bytes = self._counter("p2pkv_published_bytes", "Bytes of pages copied into the pool")
        self.unpublished_pages = self._counter(
            "p2pkv_unpublished_pages", "Pages that could not be published", "reason"
        )
        """``reason``: no_room, no_directory, timed_out, epoch, draining; changed, while it was packed; device, not
        copied from it or not in time."""
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
        self.drained_pages = self._counter(
            "p2pkv_drained_pages", "Pages that this node had when it began to drain", "outcome"
        )
        """``outcome``: handed_over; left, nobody had room or time; gone, evicted or taken back meanwhile."""
        self.adopted_pages = self._counter(
            "p2pkv_adopted_pages", "Pages of nodes that have drained that are this node's own since"
        )
        self.pinned_pages = self._counter("p2pkv_pinned_pages", "Pages that calls asked to pin", "outcome")
        """``outcome``: pinned, absent, no_room."""
        self.recompute_decisions = self._counter(
            "p2pkv_recompute_decisions",
            "Prompts with pages elsewhere: what was decided, and why",
            "choice",
            "reason",
        )
        """``choice``: :data:`FETCH_CHOICES`; ``reason``: :data:`FETCH_REASONS`."""
        for choice, reason in product(FETCH_CHOICES, FETCH_REASONS):
            self.recompute_decisions.labels(choice, reason)
        self.recompute_pages = self._counter(
            "p2pkv_recompute_pages", "Pages elsewhere that were to be fetched, or computed anew", "choice"
        )
        """``choice``: fetched, recomputed."""
        self.recompute_seconds = self._counter(
            "p2pkv_recompute_seconds", "Seconds until the tokens of such prompts were there", "figure"
        )
        """``figure``: :data:`FETCH_SECONDS`."""
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
        self.indexer_requests = self._counter(
            "p2pkv_indexer_requests", "Requests to this node's indexer", "outcome"
        )
        """``outcome``: answered, refused, failed."""
        self.looked_up_pages = Counter("p2pkv_looked_up_pages", "Pages looked up", ["source"], registry=None)
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
        """``operation``: exists, get, set, clear, register and the like. ``cause``: the class of the error."""
        self.engine_failures = self._counter(
            "p2pkv_engine_failures", "All of p2pkv_failed_calls_total: there from the start, for alerts"
        )
        # Looking a label up takes several times as long as counting.
        self._children: dict[tuple[Counter, str], Counter] = {}
        for counter, values in (
            (self.missed_pages, (*MISSES, "device")),
            (
                self.unpublished_pages,
                ("no_room", "no_directory", "timed_out", "epoch", "changed", "draining", "device"),
            ),
            (self.staged_bytes, ("to_device", "to_host")),
            (self.looked_up_pages, ("own_shard", "peers", "earlier_owners")),
            (self.indexer_requests, ("answered", "refused", "failed")),
            (self.prefetched_pages, PREFETCH_OUTCOMES),
            (self.handed_over_pages, ("accepted", "refused")),
            (self.drained_pages, ("handed_over", "left", "gone")),
            (self.pinned_pages, ("pinned", "absent", "no_room")),
            (self.recompute_pages, ("fetched", "recomputed")),
            (self.recompute_seconds, FETCH_SECONDS),
        ):
            self._show(counter, values)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def _show(self, counter: Counter, values: Iterable[str]) -> None:
        for value in values:
            self._children[counter, value] = counter.labels(value)

    def show_transports(self, names: Iterable[str]) -> None:
        """Show what is counted by transport for these, which the node has."""
        self._show(self.transport_fallbacks, names)

    def count(self, counter: Counter, label: str, n: int) -> None:
        """Add ``n`` under a counter's only label."""
        if n:
            child = self._children.get((counter, label))
            if child is None:
                child = self._children[counter, label] = counter.labels(label)
            child.inc(n)

    def counters(self) -> dict[str, float]:
        """Return every counter by its name, labels in braces: ``p2pkv_fetched_pages_total{source="disk"}``.

        Of histograms those series that have seen something.
        """
        out: dict[str, float] = {}
        for metric in self.registry.collect():
            for sample in metric.samples:
                if sample.name.endswith("_created"):
                    continue
                labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                out[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        for timing in self.timings.all():
            out.update(timing.counters())
        return out

    def watch(self, read: Readings) -> None:
        """Show what ``read`` returns, by the names of :data:`READINGS`, whenever the metrics are asked for."""
        self.registry.register(_Readings(read))

    def watch_labelled(self, read: LabelledReadings) -> None:
        """Show what ``read`` returns, by the names of :data:`LABELLED`, whenever the metrics are asked for."""
        self.registry.register(_Labelled(read))

    def read(self, counter: Counter) -> float:
        """Return the value of a counter without labels, or of one of its children."""
        samples = next(iter(counter.collect())).samples
        return next(sample.value for sample in samples if sample.name.endswith("_total"))

    def looked_up(self) -> dict[tuple[str, ...], float]:
        """Return the pages looked up so far by source, those excepted that the location cache knew."""
        samples = next(iter(self.looked_up_pages.collect())).samples
        return {(s.labels["source"],): s.value for s in samples if s.name.endswith("_total")}
