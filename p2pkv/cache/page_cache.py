"""The data path: publish pages, see where they are, fetch them.

A fetch, from top to bottom: pages of this node's own pool (an attached engine's: of its host's node) are copied, those
on its disk read; for the others the location is looked up, in the location cache and then in the directory; owners
bring back into their pools what lies on their disks; the pages are read from their owners' pools, all owners at once;
every read is validated by the page's generation word, and what fails that is looked up once more. What is not proven
right by the deadline is a miss. Nothing here is done per page: batches go to native code and come back as arrays.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.cache.call import PageCall, check_call
from p2pkv.cache.device_direct import DirectPages
from p2pkv.cache.device_rounds import DevicePages
from p2pkv.cache.fetch_counts import FetchCounts
from p2pkv.cache.guests import Followers, TakingBack
from p2pkv.cache.lengths import check_located_lengths, check_published_lengths
from p2pkv.cache.publisher import Publisher
from p2pkv.cache.warmer import Warmer
from p2pkv.cache.withdrawals import Withdrawals
from p2pkv.directory.client import DirectoryClient, Lease
from p2pkv.disk.tier import DiskTier
from p2pkv.errors import UsageError
from p2pkv.memory.registrations import Registrations
from p2pkv.memory.staging import DeviceMemory
from p2pkv.metrics import MISSES, Metrics
from p2pkv.page import (
    RESIDENT,
    Keys,
    Namespace,
    Outcomes,
    Pages,
    Pieces,
    Whereabouts,
    as_locations,
)
from p2pkv.peers.connections import PeerConnections
from p2pkv.pool import Pool

_ROUNDS = 2
"""A page whose location turns out stale is looked up once more; twice stale is being evicted right now: a miss."""
_PROMOTE_SHARE = 0.75
"""Of the time left, for an owner's disk; the rest is for reading what it brought."""
_DISK_SHARE = 0.5
"""Of the time left, for this node's own disk; the rest is for the peers, who may have what it doesn't bring."""
_DROP_S = 0.02
"""For taking a stale entry back before the second look-up."""


class PageCache:
    """Thread-safe. ``deadline`` is a time of ``time.monotonic()``; calls return by then."""

    def __init__(
        self,
        *,
        namespace: Namespace,
        pool: Pool,
        directory: DirectoryClient,
        peers: PeerConnections,
        registrations: Registrations,
        shard: _native.Shard,
        own_key: int,
        check_sums: bool,
        metrics: Metrics,
        devices: DeviceMemory,
        device_direct: int = 0,
        tier: DiskTier | None = None,
        guests: _native.Guests,
        followers: Followers,
        taking_back: TakingBack,
        history: _native.PageHistory | None = None,
        others: _native.OtherHolders | None = None,
        touches: _native.Touches | None = None,
        of_host: _native.CurrentMappedPool | None = None,
    ) -> None:
        """``device_direct``: bytes of mapped memory that devices may copy from; 0: all their pages are staged.

        ``others``: where the directory puts other holders of pages; None: none is read from but the first.

        ``touches`` takes what is read from peers; None: their owners don't hear of it. ``of_host`` has the pool of this
        host's node, if this is an engine that is attached: it takes the place of the own one, which is empty.
        """
        self.namespace = namespace
        self._withdrawals = Withdrawals(pool, tier, directory, followers, taking_back)
        self._pool = pool
        self._look_in_pool = pool.native.lookup if of_host is None else of_host.lookup
        self._directory = directory
        self._registrations = registrations
        self._shard = shard
        self._own_key = own_key
        self._tier = tier
        self._warmer = Warmer(directory, own_key)
        self._metrics = metrics
        # Bounded in time, so that a page that moved is found again; stale entries cost a second look-up, no more.
        self.locations = _native.LocationCache(65536, 10.0)
        self._timings = timings = metrics.timings
        source_names = ["own_pool", "disk", *peers.domains]
        self._sources = _native.FetchSources(
            pool.native,
            None if tier is None else tier.native,
            self.locations,
            shard,
            peers.native,
            own_key,
            check_sums,
            timings.fetches.native,
            timings.by_source(source_names).native,
            history,
            others,
            touches,
            of_host,
        )
        # whose checksums are to be compared have to be in host memory for that
        is_direct = device_direct > 0 and not check_sums and of_host is None
        direct = DirectPages(self._sources, devices, device_direct, metrics) if is_direct else None
        self.device_pages = DevicePages(devices, pool, metrics, direct)
        self._publisher = Publisher(
            pool=pool,
            directory=directory,
            guests=guests,
            tier=tier,
            device_pages=self.device_pages,
            metrics=metrics,
        )
        self._counts = FetchCounts(self._sources, source_names, metrics)

    def publish(
        self,
        keys: Sequence[str | bytes],
        pages: Pages,
        deadline: float,
        *,
        stream: int | None = None,
        epoch: int | None = None,
    ) -> Outcomes:
        """Copy pages into the pool and tell the directory; ``HIT`` for those that can be fetched now.

        Pages of an ``epoch`` that is over are not stored, nor any once this node is draining.
        """
        began = time.monotonic()
        in_epoch, ids = self.hash(keys)
        call = check_call(ids, pages, self._registrations.table, stream, writable=False)
        is_current = epoch is None or epoch == in_epoch
        return self._publisher.publish(call, deadline, began, is_current=is_current)

    def drain(self) -> None:
        """Store no more of what is published."""
        self._publisher.drain()

    def exists(self, keys: Sequence[str | bytes], deadline: float, *, leading: bool = False) -> Outcomes:
        """Say which pages some live node has; their locations are remembered for the fetch that follows.

        ``leading``: what comes after the first page that nobody has may be said to be missing.
        """
        began = time.monotonic()
        _, ids = self.hash(keys)
        outcomes, _ = self._look_in_pool(ids)
        rows = np.flatnonzero(outcomes == 0)
        if len(rows) and self._tier is not None:
            outcomes[rows] = self._tier.contains(ids[rows])
            rows = np.flatnonzero(outcomes == 0)
        if len(rows):
            left = ids if len(rows) == len(ids) else ids[rows]
            outcomes[rows], _ = self._look_up(left, deadline, leading=leading)
        self._timings.exists.native.add(0, len(ids), time.monotonic() - began)
        return outcomes

    def whereabouts(
        self, keys: Sequence[str | bytes], deadline: float, *, leading: bool = False
    ) -> Whereabouts:
        """Say as :meth:`exists` does which pages some live node has, and where; these are remembered too."""
        began = time.monotonic()
        _, ids = self.hash(keys)
        found, own = self._look_in_pool(ids)
        locations = as_locations(own)
        rows = np.flatnonzero(found == 0)
        if len(rows) and self._tier is not None:
            found[rows] = self._tier.contains(ids[rows])
            locations[rows] = self._tier.on_disk(len(rows))
            rows = np.flatnonzero(found == 0)
        if len(rows):
            found[rows], raw = self._look_up(ids[rows], deadline, leading=leading)
            locations[rows] = as_locations(raw)
        self._timings.exists.native.add(0, len(ids), time.monotonic() - began)
        is_on_disk = locations["flags"] & RESIDENT == 0
        return Whereabouts(found, locations["owner"], is_on_disk, locations["length"])

    def _look_up(
        self, ids: Keys, deadline: float, *, leading: bool
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Ask the directory; return what it found, and ``(n, 64)`` where."""
        found, raw = self._directory.get(ids, deadline, leading=leading)
        if self._tier is not None:
            self._doubt_own(self._tier, ids, found, raw)
        there_ids, there_raw = ids, raw
        if not found.all():  # rarely so before a fetch; picking rows out costs more than remembering them
            there = found.view(bool)
            there_ids, there_raw = ids[there], raw[there]
        self.locations.put(there_ids, there_raw)
        self._warmer.warm(there_ids, there_raw)
        return found, raw

    def _doubt_own(self, tier: DiskTier, ids: Keys, found: NDArray[np.uint8], raw: NDArray[np.uint8]) -> None:
        """Believe of entries that lead to this node only what it has; have the others taken out.

        It had none of these pages a moment ago; one that was published or promoted since is in the pool.
        """
        leads_here = found.view(bool) & (as_locations(raw)["owner"] == self._own_key)
        if not leads_here.any():
            return
        own = ids[leads_here]
        found[leads_here], _ = tier.locate(own)
        tier.recheck(own)

    def fetch(
        self, keys: Sequence[str | bytes], pages: Pages, deadline: float, *, stream: int | None = None
    ) -> Outcomes:
        """Bring pages into registered memory; ``HIT`` for those whose bytes are exactly the published ones."""
        if stream is None and isinstance(pages, np.ndarray):
            # Most calls are of this kind, and most of them need no more than this one call of native code.
            table, left = self._registrations.table.native, deadline - time.monotonic()
            found = self._sources.fetch_rows(
                self.namespace.prefix, keys, pages, table, left, left * _DISK_SHARE
            )
            if found is not None:
                outcomes, batch, lengths_agree, has_read = found
                if outcomes is not None:
                    return outcomes
                if not lengths_agree:
                    check_published_lengths(self._pool, self._to_be_fetched(keys, pages, None))
                return self._fetch_rest(batch, table, deadline, has_read=has_read)
        call = self._to_be_fetched(keys, pages, stream)
        if call.device_of is None:
            return self._fetch(call, deadline)
        return self.device_pages.fetch(call, self._fetch, deadline)

    def _to_be_fetched(self, keys: Sequence[str | bytes], pages: Pages, stream: int | None) -> PageCall:
        return check_call(self.hash(keys)[1], pages, self._registrations.table, stream, writable=True)

    def _fetch(self, call: PageCall, deadline: float) -> Outcomes:
        """Bring pages into host memory, wherever in it they are to be."""
        batch, table = _native.FetchBatch(call.ids, call.pieces, call.memory_of), call.table.native
        left = deadline - time.monotonic()
        lengths_agree, has_read = self._sources.gather(batch, table, left, left * _DISK_SHARE)
        if not lengths_agree:
            check_published_lengths(self._pool, call)
        return (
            batch.outcomes()
            if batch.is_over()
            else self._fetch_rest(batch, table, deadline, has_read=has_read)
        )

    def _fetch_rest(
        self, batch: _native.FetchBatch, table: _native.LocalMemories, deadline: float, *, has_read: bool
    ) -> Outcomes:
        """Look up what is not there yet and read it; once more what turns out stale.

        ``has_read``: what was located has been read already, which was the first round.
        """
        has_promoted = False
        for attempt in range(_ROUNDS):
            if attempt or not has_read:
                self._locate(batch, deadline, anew=attempt > 0)
                promoted = self._promote(batch, deadline)
                has_promoted |= promoted is not None
                try:
                    self._read(batch, table, deadline, look_again=attempt + 1 < _ROUNDS)
                finally:
                    if promoted is not None:
                        self._directory.release(*promoted)
            if attempt + 1 == _ROUNDS or not self._forget_stale(batch, deadline):
                break
        for reason, n_pages in zip(MISSES, self._sources.finish(batch, has_promoted), strict=True):
            self._metrics.count(self._metrics.missed_pages, reason, n_pages)
        return batch.outcomes()

    def read_located(self, ids: Keys, pages: Pieces, raw: NDArray[np.uint8], deadline: float) -> Outcomes:
        """Read pages of peers from where they are said to lie, and from nowhere else.

        ``raw`` is ``(n, 64)``. Returns as :meth:`fetch` does; what is not there any more is a miss, and not looked up.
        """
        call = check_call(ids, pages, self._registrations.table, None, writable=True)
        batch = _native.FetchBatch(call.ids, call.pieces, call.memory_of)
        n = len(ids)
        batch.locate(np.arange(n), np.ones(n, np.uint8), raw, self._shard, self.locations)
        left = deadline - time.monotonic()
        self._sources.read(batch, call.table.native, left, elsewhere=False, look_again=False, use=False)
        return batch.outcomes()

    def _read(
        self, batch: _native.FetchBatch, table: _native.LocalMemories, deadline: float, *, look_again: bool
    ) -> None:
        """Read what has been located, from whichever peers have it."""
        left = deadline - time.monotonic()
        self._sources.read(batch, table, left, elsewhere=True, look_again=look_again, use=True)

    def _locate(self, batch: _native.FetchBatch, deadline: float, *, anew: bool) -> None:
        """Find out where the pages lie that are not there yet. Raises UsageError if one has another length."""
        pages, ids = batch.unlocated()
        if len(pages):
            now = time.monotonic()
            # Half: an owner of entries that stays silent must not cost the pages that were found.
            found, raw = self._directory.get(ids, now + (deadline - now) / 2, anew=anew)
            batch.locate(pages, found, raw, self._shard, self.locations)
        check_located_lengths(batch)

    def _promote(self, batch: _native.FetchBatch, deadline: float) -> tuple[Lease, NDArray[np.uint8]] | None:
        """Have the owners of pages that lie on their disks bring them into their pools, each asked once.

        Returns what to release once the pages are read, or None if there was nothing to ask for.
        """
        pages, ids, raw = batch.cold(self._own_key)
        if not len(pages):
            return None
        seconds = max(0.0, deadline - time.monotonic())
        until = deadline - seconds * (1 - _PROMOTE_SHARE)
        # An owner that answers at its last moment must still be heard.
        answer_s = seconds * _PROMOTE_SHARE * 0.8
        lease = Lease(seconds, secrets.randbits(64))
        found, where = self._directory.promote(ids, raw, until, answer_s=answer_s, lease=lease)
        batch.locate(pages, found, where, self._shard, self.locations)
        check_located_lengths(batch)
        return lease, raw

    def _forget_stale(self, batch: _native.FetchBatch, deadline: float) -> bool:
        """Forget locations that were no good; whether some pages are worth another look-up."""
        n_pages, ids, raw = batch.forget_stale(self._own_key, self.locations)
        if len(ids):
            until = min(deadline, time.monotonic() + _DROP_S)
            self._directory.drop(ids, as_locations(raw), until, by_owner=False)
        return n_pages > 0 and time.monotonic() < deadline

    def retract(self, keys: Sequence[str | bytes], deadline: float) -> Outcomes:
        """Take back pages that this node published; ``HIT`` for those it had."""
        return self._withdrawals.retract(self.hash(keys)[1], deadline)

    def clear(self, deadline: float) -> int:
        """Take back all pages that this node published; return the number of those in its pool."""
        return self._withdrawals.clear(deadline)

    def close(self) -> None:
        """Stop warming. Idempotent."""
        self._warmer.close()

    def hash(self, keys: Sequence[str | bytes]) -> tuple[int, Keys]:
        """Return the epoch that this call is of from here on, and the hashes of its keys."""
        epoch, ids = self.namespace.hash_in_epoch(keys)
        if not len(ids):
            raise UsageError("the batch is empty; give at least one key")
        duplicate = _native.find_duplicate(ids)
        if duplicate is not None:
            raise UsageError(f"key {duplicate} of the batch, {keys[duplicate]!r}, is in it twice")
        return epoch, ids

    @property
    def n_fetched(self) -> int:
        """Pages that calls have found so far, wherever they came from."""
        return self._counts.n_fetched

    @property
    def n_hosts_guests(self) -> int:
        """Of these, pages of other nodes that lay in the pool of this host's node."""
        return self._counts.n_hosts_guests

    def hot_pages(self, most: int, least_looks: int = 1) -> list[tuple[bytes, float]]:
        """Return the ids of the pages that calls found most often in the last 10 to 20 seconds, with finds a second.

        Of many finds a sample is looked at: pages that were seen in it fewer than ``least_looks`` times are left out.
        """
        return self._sources.hot_pages(most, least_looks)

    def finds(self, most: int) -> tuple[Keys, NDArray[np.uint64], NDArray[np.uint32]]:
        """Return what :meth:`hot_pages` knows: ids, finds in 1,000 seconds, and in how many looks each was seen."""
        return self._sources.finds(most)

    def readings(self) -> dict[str, float]:
        """Return what native code has counted of fetches, by the names of the metrics."""
        return self._counts.readings()
