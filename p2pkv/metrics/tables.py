"""The names of what is read when metrics are asked for, and the values that labels have.

Labels have few values, all of which are known beforehand.
"""

from __future__ import annotations

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
    "p2pkv_distinct_published_pages": "Different pages that were published here, estimated",
    "p2pkv_hit_rate_ratio": "Pages found here of those found or published, since the start",
    "p2pkv_hit_rate_ceiling_ratio": "The same if this node's pool had never evicted a page",
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
    "p2pkv_attached": "1 while this engine is attached to its host's node",
    "p2pkv_attachments_total": "Times this engine has attached to its host's node",
    "p2pkv_attached_engines": "Engines that are attached to this node",
    "p2pkv_attached_lines": "Requests that engines can have under way at this node now",
    "p2pkv_attached_memory_bytes": "Memory of engines that this node has mapped, to read published pages from it",
    "p2pkv_attach_requests_total": "Requests of attached engines",
    "p2pkv_attach_withdrawn_total": "Publishes that engines took back at their deadlines",
    "p2pkv_attach_refused_total": "Connections of engines refused: other users or versions, beyond a limit, nonsense",
    "p2pkv_attach_stored_pages_total": "Pages copied out of engines' memory into the pool",
    "p2pkv_attach_stored_bytes_total": "Bytes of these pages",
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
    "p2pkv_hedged_reads_total": ("Reads from a peer that went on with another holder", ("reason",)),
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
that were read from, and ``others``. ``reason`` of hedged reads: :data:`HEDGES`."""

MISSES = ("not_found", "rejected", "peer_lost", "timed_out", "checksum", "not_promoted", "unreadable")
"""Why a fetch misses a page, in the order of ``FetchBatch::Miss``. rejected: it was another page by then;
not_promoted: it is still on a peer's disk; unreadable: it came packed and can't be unpacked."""

HEDGES = ("late", "overdue", "failed", "slow", "unknown")
"""Why a read goes on with another holder, in the order of ``Hedges::Why``. late: most reads of that size from that
peer were over by then; overdue: a quarter of the time was over, and too many reads were late; failed: the holder was
lost, or had the page no more; slow: it was late a moment ago; unknown: half of the time was over, and the directory is
asked for other holders."""

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
