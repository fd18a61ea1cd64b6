"""The data path: publish pages, see where they are, fetch them.

A fetch, from top to bottom: pages of this node's own pool are copied; for the others the location is looked up, in the
location cache and then in the directory; the pages are read from their owners' pools, all owners at once; every read
is validated by the page's generation word, and what fails that is looked up once more. What is not proven right by the
deadline is a miss. Nothing here is done per page: batches go to native code and come back as arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.directory.client import DirectoryClient, Rows
from p2pkv.directory.view import View
from p2pkv.errors import NotRegisteredError, UsageError
from p2pkv.metrics import Metrics
from p2pkv.page import LOCATION, Keys, Locations, Namespace, Outcome, Outcomes, Pieces
from p2pkv.pool import FetchStatus, Pool, PoolStatus, as_bytes, as_locations
from p2pkv.transfer import Connection, Memory, TransferEngine
from p2pkv.transports.base import Status, Statuses, Transfer

_ROUNDS = 2
"""A page whose location turns out stale is looked up once more; twice stale is being evicted right now: a miss."""
_DROP_S = 0.02
"""For taking a stale entry back before the second look-up."""

_REASONS = {
    Status.REJECTED: "rejected",
    Status.PEER_LOST: "peer_lost",
    Status.CANCELED: "peer_lost",
    Status.TIMED_OUT: "timed_out",
    Status.OUT_OF_RANGE: "rejected",
}


@dataclass(frozen=True, slots=True)
class _Batch:
    """A call's pages, checked: registered, of positive length, no key twice."""

    ids: Keys
    pieces: NDArray[np.int64]  # (n, p, 2)
    lengths: NDArray[np.int64]
    memory_of: NDArray[np.int32]  # (n, p): index into memories
    memories: list[Memory]

    @property
    def outcomes(self) -> Outcomes:
        return np.zeros(len(self.ids), np.uint8)


@dataclass(slots=True)
class _Flight:
    """One owner's part of a fetch, under way: a leg for each registered memory, one after another."""

    connection: Connection
    rows: Rows
    legs: list[int]  # indexes of memories; the first is in the air
    transfer: Transfer
    pieces: NDArray[np.int64]  # which of the rows' pieces the transfer brings
    statuses: Statuses  # of all the rows' pieces
    began: float
    landed: bool = False


class PageCache:
    """Thread-safe. ``deadline`` is a time of ``time.monotonic()``; calls return by then."""

    def __init__(
        self,
        *,
        namespace: Namespace,
        pool: Pool,
        directory: DirectoryClient,
        transfers: TransferEngine,
        view: Callable[[], View],
        own_key: int,
        check_sums: bool,
        metrics: Metrics,
    ) -> None:
        self._namespace = namespace
        self._pool = pool
        self._directory = directory
        self._transfers = transfers
        self._view = view
        self._own_key = own_key
        self._check_sums = check_sums
        self._metrics = metrics
        # Bounded in time, so that a page that moved is found again; stale entries cost a second look-up, no more.
        self.locations = _native.LocationCache(65536, 10.0)

    def publish(self, keys: Sequence[str | bytes], pages: Pieces | NDArray[Any], deadline: float) -> Outcomes:
        """Copy pages into the pool and tell the directory; ``HIT`` for those that can be fetched now."""
        batch = self._batch(keys, pages, writable=False)
        self._check_room(batch)
        self._check_lengths(batch, *self._own_locations(batch.ids))
        statuses, locations = self._pool.publish(batch.ids, batch.pieces)
        there = (statuses == PoolStatus.STORED) | (statuses == PoolStatus.EXISTS)
        outcomes = batch.outcomes
        if there.any():
            acked = self._directory.put(batch.ids[there], locations[there], deadline)
            outcomes[np.flatnonzero(there)[acked]] = Outcome.HIT
            self._count_unpublished("no_directory", int((~acked).sum()))
        self._count_unpublished("no_room", int((~there).sum()))
        self._metrics.published_pages.inc(int(outcomes.sum()))
        self._metrics.published_bytes.inc(int(batch.lengths[statuses == PoolStatus.STORED].sum()))
        return outcomes

    def exists(self, keys: Sequence[str | bytes], deadline: float) -> Outcomes:
        """Say which pages some live node has; their locations are remembered for the fetch that follows."""
        ids = self._hash(keys)
        found, _ = self._own_locations(ids)
        outcomes = found.astype(np.uint8)
        rows = np.flatnonzero(~found)
        if len(rows):
            located, locations = self._directory.get(ids[rows], deadline)
            located &= self._owner_is_present(locations, located)
            self.locations.put(ids[rows[located]], as_bytes(locations[located]))
            outcomes[rows[located]] = Outcome.HIT
        return outcomes

    def fetch(self, keys: Sequence[str | bytes], pages: Pieces | NDArray[Any], deadline: float) -> Outcomes:
        """Bring pages into registered memory; ``HIT`` for those whose bytes are exactly the published ones."""
        batch = self._batch(keys, pages, writable=True)
        own = self._pool.fetch(batch.ids, batch.pieces)
        if (own == FetchStatus.OTHER_LENGTH).any():
            self._check_lengths(batch, *self._own_locations(batch.ids))
        outcomes = (own == FetchStatus.HIT).astype(np.uint8)
        self._count_fetched("own_pool", batch, outcomes.astype(bool))
        rows = np.flatnonzero(outcomes == Outcome.MISS)
        locations = np.empty(len(batch.ids), LOCATION)
        for attempt in range(_ROUNDS):
            if not len(rows):
                break
            located = self._locate(batch.ids, rows, locations, deadline, fresh=attempt > 0)
            self._count_missed("not_found", len(rows) - len(located))
            self._check_lengths(batch, _mask(located, len(batch.ids)), locations)
            statuses = self._read(batch, located, locations, deadline)
            hits = self._verified(batch, located[statuses == Status.OK], locations)
            outcomes[hits] = Outcome.HIT
            rows = self._forget_stale(batch, located, locations, statuses, deadline)
            if attempt + 1 == _ROUNDS or time.monotonic() >= deadline:
                self._count_failures(statuses)
                break
            self._count_failures(statuses[~np.isin(located, rows)])
        return outcomes

    def retract(self, keys: Sequence[str | bytes], deadline: float) -> Outcomes:
        """Take back pages that this node published; ``HIT`` for those it had."""
        ids = self._hash(keys)
        found, locations = self._pool.retract(ids)
        mask = found.astype(bool)
        if mask.any():
            self._directory.drop(ids[mask], locations[mask], deadline, by_owner=True)
        return mask.astype(np.uint8)

    def _hash(self, keys: Sequence[str | bytes]) -> Keys:
        ids = self._namespace.hash(keys)
        if not len(ids):
            raise UsageError("the batch is empty; give at least one key")
        duplicate = _native.find_duplicate(ids)
        if duplicate is not None:
            raise UsageError(f"key {duplicate} of the batch, {keys[duplicate]!r}, is in it twice")
        return ids

    def _batch(self, keys: Sequence[str | bytes], pages: Pieces | NDArray[Any], *, writable: bool) -> _Batch:
        ids = self._hash(keys)
        pieces = _pieces(pages, writable=writable)
        if len(pieces) != len(ids):
            raise UsageError(f"{len(ids)} keys, but memory for {len(pieces)} pages")
        memories = self._transfers.memories()
        registered = np.array([(m.address, m.nbytes) for m in memories], np.int64).reshape(-1, 2)
        memory_of, lengths = _native.locate_pieces(pieces, registered)
        if (lengths < 0).any():
            page = int(np.flatnonzero(lengths < 0)[0])
            raise UsageError(f"page {page} has a piece of no or negative length: {pieces[page].tolist()}")
        if (memory_of < 0).any():
            page, piece = np.argwhere(memory_of < 0)[0].tolist()
            address, nbytes = pieces[page, piece].tolist()
            raise NotRegisteredError(
                f"piece {piece} of page {page}, {nbytes} bytes at {address:#x}, lies in no registered memory; "
                "call register_memory first"
            )
        read_only = [index for index, memory in enumerate(memories) if not memory.is_writable]
        if writable and read_only and np.isin(memory_of, read_only).any():
            raise UsageError(
                "the pages are to be written, but their memory was registered from a read-only array"
            )
        return _Batch(ids, pieces, lengths, memory_of, memories)

    def _check_room(self, batch: _Batch) -> None:
        largest = int(batch.lengths.max())
        if largest > self._pool.largest_page:
            raise UsageError(
                f"a page of {largest} bytes does not fit the pool, which takes pages of up to "
                f"{self._pool.largest_page}; raise pool_size"
            )

    def _check_lengths(self, batch: _Batch, known: NDArray[np.bool_], locations: Locations) -> None:
        wrong = np.flatnonzero(known & (locations["length"] != batch.lengths.astype(np.uint64)))
        if len(wrong):
            page = int(wrong[0])
            raise UsageError(
                f"page {page} was published with {locations['length'][page]} bytes, the memory given for it has "
                f"{batch.lengths[page]}; is something missing in the namespace?"
            )

    def _own_locations(self, ids: Keys) -> tuple[NDArray[np.bool_], Locations]:
        found, locations = self._pool.lookup(ids)
        return found.astype(bool), locations

    def _locate(self, ids: Keys, rows: Rows, locations: Locations, deadline: float, *, fresh: bool) -> Rows:
        """Fill in ``locations`` for ``rows``; return the rows found at members that are present."""
        known = np.zeros(len(rows), bool)
        if not fresh:
            cached, raw = self.locations.get(ids[rows])
            known = cached.astype(bool)
            locations[rows[known]] = as_locations(raw)[known]
            known &= self._owner_is_present(locations[rows], known)
            self._metrics.looked_up_pages.labels("location_cache").inc(int(known.sum()))
        unknown = np.flatnonzero(~known)
        if len(unknown):
            asked = rows[unknown]
            now = time.monotonic()
            # Half: an owner of entries that stays silent must not cost the pages that were found.
            found, there = self._directory.get(ids[asked], now + (deadline - now) / 2)
            found &= self._owner_is_present(there, found)
            locations[asked[found]] = there[found]
            known[unknown[found]] = True
            self.locations.put(ids[asked[found]], as_bytes(there[found]))
        return rows[known]

    def _owner_is_present(self, locations: Locations, known: NDArray[np.bool_]) -> NDArray[np.bool_]:
        view = self._view()
        present = np.zeros(len(locations), bool)
        for owner in np.unique(locations["owner"][known]):
            member = view.by_key(int(owner))
            if member is not None and member.is_present:
                present |= (locations["owner"] == owner) & (locations["boot"] == member.boot_epoch)
        return present

    def _read(self, batch: _Batch, rows: Rows, locations: Locations, deadline: float) -> Statuses:
        """Read ``rows`` from their owners, all at once; return a status a row."""
        statuses = np.full(len(rows), Status.REJECTED, np.uint8)
        flights: list[_Flight] = []
        try:
            for owner in np.unique(locations["owner"][rows]):
                if owner == self._own_key:
                    continue  # the pool was asked already: the entry is stale
                mine = rows[locations["owner"][rows] == owner]
                statuses[np.isin(rows, mine)] = Status.PEER_LOST
                flight = self._take_off(batch, mine, locations, int(owner), deadline)
                if flight is not None:
                    flights.append(flight)
            for flight in flights:
                statuses[np.isin(rows, flight.rows)] = self._land(flight, batch, locations, deadline)
        finally:
            for flight in flights:
                if not flight.landed:
                    self._transfers.discard(flight.connection)
        return statuses

    def _take_off(
        self, batch: _Batch, rows: Rows, locations: Locations, owner: int, deadline: float
    ) -> _Flight | None:
        member = self._view().by_key(owner)
        connection = self._transfers.lease(member, deadline) if member is not None else None
        if connection is None:
            return None
        legs = np.unique(batch.memory_of[rows]).tolist()
        transfer, pieces = _read_leg(connection, batch, rows, locations, legs[0])
        statuses = np.full(len(rows) * batch.pieces.shape[1], Status.PEER_LOST, np.uint8)
        return _Flight(connection, rows, legs, transfer, pieces, statuses, time.monotonic())

    def _land(self, flight: _Flight, batch: _Batch, locations: Locations, deadline: float) -> Statuses:
        """Wait for one owner's part; return a status a page: the worst of its pieces'."""
        while True:
            arrived = flight.transfer.wait(max(0.0, deadline - time.monotonic()))
            flight.statuses[flight.pieces] = arrived
            flight.legs.pop(0)
            if not flight.legs or not TransferEngine.is_usable_after(arrived):
                break
            flight.transfer, flight.pieces = _read_leg(
                flight.connection, batch, flight.rows, locations, flight.legs[0]
            )
        flight.landed = True
        worst: Statuses = flight.statuses.reshape(len(flight.rows), -1).max(axis=1)
        good = flight.rows[worst == Status.OK]
        self._transfers.release(
            flight.connection,
            arrived,
            n_pages=len(good),
            nbytes=int(batch.lengths[good].sum()),
            seconds=time.monotonic() - flight.began,
        )
        self._count_fetched(flight.connection.transport, batch, good)
        return worst

    def _verified(self, batch: _Batch, rows: Rows, locations: Locations) -> Rows:
        if not self._check_sums or not len(rows):
            return rows
        right = _native.checksum_pages(batch.pieces[rows]) == locations["checksum"][rows]
        self._count_missed("checksum", int((~right).sum()))
        return rows[right]

    def _forget_stale(
        self, batch: _Batch, rows: Rows, locations: Locations, statuses: Statuses, deadline: float
    ) -> Rows:
        """Forget locations that were no good; return the rows that are worth another look-up."""
        bad = rows[(statuses == Status.REJECTED) | (statuses == Status.PEER_LOST)]
        if len(bad):
            self.locations.drop(batch.ids[bad])
            stale = rows[statuses == Status.REJECTED]
            if len(stale):
                until = min(deadline, time.monotonic() + _DROP_S)
                self._directory.drop(batch.ids[stale], locations[stale], until, by_owner=False)
        return bad

    def _count_fetched(self, source: str, batch: _Batch, rows: Rows | NDArray[np.bool_]) -> None:
        lengths = batch.lengths[rows]
        if len(lengths):
            self._metrics.fetched_pages.labels(source).inc(len(lengths))
            self._metrics.fetched_bytes.labels(source).inc(int(lengths.sum()))

    def _count_failures(self, statuses: Statuses) -> None:
        for status in np.unique(statuses):
            if status != Status.OK:
                self._count_missed(_REASONS[Status(status)], int((statuses == status).sum()))

    def _count_missed(self, reason: str, n_pages: int) -> None:
        if n_pages:
            self._metrics.missed_pages.labels(reason).inc(n_pages)

    def _count_unpublished(self, reason: str, n_pages: int) -> None:
        if n_pages:
            self._metrics.unpublished_pages.labels(reason).inc(n_pages)


def _pieces(pages: Pieces | NDArray[Any], *, writable: bool) -> NDArray[np.int64]:
    if isinstance(pages, Pieces):
        return pages.array
    if not isinstance(pages, np.ndarray):
        raise UsageError(f"pages must be a numpy array or Pieces, not {type(pages).__name__}")
    pieces = Pieces.of_rows(pages).array
    if writable and not pages.flags.writeable:
        raise UsageError("the pages are to be written, but their array is read-only")
    if writable and len(pages) > 1 and abs(pages.strides[0]) < pages[:1].nbytes:
        raise UsageError("the pages are to be written, but the rows of their array overlap")
    return pieces


def _read_leg(
    connection: Connection, batch: _Batch, rows: Rows, locations: Locations, leg: int
) -> tuple[Transfer, NDArray[np.int64]]:
    """Start reading those pieces of ``rows`` that lie in one registered memory."""
    memory = batch.memories[leg]
    spans, words, pieces = _native.plan_reads(
        batch.pieces, batch.memory_of, as_bytes(locations), rows, leg, memory.address
    )
    local = memory.region(connection.transport)
    return connection.endpoint.read(local, connection.remote, spans, words=words), pieces


def _mask(rows: Rows, n: int) -> NDArray[np.bool_]:
    mask = np.zeros(n, bool)
    mask[rows] = True
    return mask
