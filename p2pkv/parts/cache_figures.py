"""Figures of a node's cache: its pool, its part of the directory, and what was found in it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from p2pkv.directory.ring import Ring
from p2pkv.metrics import Metrics
from p2pkv.parts.control import ControlParts

if TYPE_CHECKING:
    from p2pkv.parts.cache import CacheParts


class CacheFigures:
    """Thread-safe; the metrics ask at each scrape, from when the cache serves."""

    def __init__(self, parts: CacheParts, control: ControlParts, metrics: Metrics, own_key: int) -> None:
        self._parts = parts
        self._control = control
        self._metrics = metrics
        self._own_key = own_key
        self._share: tuple[Ring, float] | None = None

    def published_and_found(self) -> tuple[float, float]:
        """Return how many pages were computed here so far, attached engines' too, and how many calls here found.

        What is computed is published; but who only fetches, and computes nothing for others, has missed it.
        """
        missed = sum(self._metrics.missed_pages.values().values())
        published = self._metrics.published_pages.value
        if self._parts.attach_host is not None:
            published += self._parts.attach_host.readings()["p2pkv_attach_stored_pages_total"]
        return max(published, missed), self._parts.cache.n_fetched

    def of_pool(self) -> dict[str, float]:
        """Return what the pool has and has had, and what is held in it for others."""
        guests, pool = self._parts.guests.stats(), self._parts.pool.stats()
        return {
            "p2pkv_pool_capacity_bytes": pool["capacity"],
            "p2pkv_pool_used_bytes": pool["used"],
            "p2pkv_pool_pinned_bytes": pool["pinned_bytes"],
            "p2pkv_pool_pages": pool["pages"],
            "p2pkv_pins_bytes": self._parts.pins.nbytes,
            "p2pkv_guest_pages": guests["pages"],
            "p2pkv_fetched_guest_pages_total": pool["guest_hits"],
            "p2pkv_taken_back_guests_total": guests["taken_back"],
            "p2pkv_lost_sources_total": guests["sources_lost"],
            "p2pkv_silent_sources": self._parts.sources.n_silent,
            "p2pkv_followers": len(self._parts.guests.followers()),
            "p2pkv_draining": float(self._parts.drainer.has_begun),
            "p2pkv_prefetches": self._parts.prefetcher.n_waiting,
            "p2pkv_pool_next_out_age_seconds": self._next_out_age(),
            "p2pkv_untold_evictions": pool["untold_evictions"],
            "p2pkv_stored_pages_total": pool["stored_pages"],
            "p2pkv_evicted_pages_total": pool["evicted_pages"],
            "p2pkv_attach_share_outgrown_pages_total": pool["outgrown_pages"],
            "p2pkv_no_room_pages_total": pool["no_room_pages"],
            "p2pkv_dropped_evictions_total": pool["dropped_evictions"],
            "p2pkv_packing": pool["is_packing"],
            "p2pkv_packed_pages_total": pool["packed_pages"],
            "p2pkv_packing_bytes_total": pool["tried_bytes"],
            "p2pkv_packing_stored_bytes_total": pool["tried_stored_bytes"],
            "p2pkv_packing_seconds_total": pool["packing_nanoseconds"] / 1e9,
        }

    def _next_out_age(self) -> float:
        """Return how long ago the page came that is evicted next; if that is forgotten, how far memory reaches."""
        page = self._parts.pool.native.oldest()
        if page is None:
            return 0.0
        came, forgets = self._control.history.stored_at(page), self._control.history.reach()[0]
        return max(0.0, time.time() - (forgets if came is None else came))

    def of_directory(self) -> dict[str, float]:
        """Return what this node has of the directory, and what it is asked."""
        shard, directory = self._control.shard.stats(), self._parts.directory_server.stats()
        return {
            "p2pkv_shard_entries": shard["entries"],
            "p2pkv_shard_tombstones": shard["tombstones"],
            "p2pkv_shard_bytes": shard["nbytes"],
            "p2pkv_directory_requests_total": directory["requests"],
            "p2pkv_directory_channels": directory["channels"],
            "p2pkv_heard_touches_total": directory["touches"],
            "p2pkv_ring_share_ratio": self._ring_share(),
        }

    def _ring_share(self) -> float:
        """Return this node's part of the ring, which takes a while to find and seldom changes."""
        ring = self._parts.directory.ring
        if self._share is None or self._share[0] is not ring:
            self._share = ring, ring.share(self._own_key)
        return self._share[1]
