"""The directory as one node uses it: put, get and drop entries at the shards that own them.

A key's entry lies at ``replicas`` nodes of the ring. They are asked in parallel. An entry found anywhere counts;
"not found" is final when every healthy owner said so; an owner that stays silent while another has spoken is waited
for :data:`SILENT_OWNER_S` and no longer. The node's own shard is called directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.control import Calls, ControlClient, Request
from p2pkv.directory.ring import Owners, Ring
from p2pkv.directory.view import Member, State, View, node_key
from p2pkv.metrics import Metrics
from p2pkv.page import LOCATION, Keys, Locations
from p2pkv.wire import DROP_ENTRY, MAX_ENTRIES, PUT_ENTRY, Kind, Reply

SILENT_OWNER_S = 0.020
"""Twenty round trips on a busy machine, and no more than a fetch may lose to a peer that has stopped."""

Mask = NDArray[np.bool_]
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Route:
    """What one view means for requests. Never changes, so a call uses one route from beginning to end."""

    ring: Ring
    own_index: int
    healthy: Mask  # by index into ring.members; the own node is not in it: it is never sent anything


class DirectoryClient:
    """Thread-safe. Calls block at most until their deadline, a time of ``time.monotonic()``."""

    def __init__(
        self, *, own_key: int, shard: _native.Shard, client: ControlClient, replicas: int, metrics: Metrics
    ) -> None:
        self._own_key = own_key
        self._shard = shard
        self._client = client
        self._replicas = replicas
        self._metrics = metrics
        self._sequences = count(1)
        self.on_missed: Callable[[str], None] = lambda _: None
        """Called with the id of an owner that did not take a put: what it missed must be put again."""
        self.set_view(View())

    def set_view(self, view: View) -> None:
        """Route by ``view`` from now on; entries of owners outside it stop counting."""
        ring = Ring(view.present(), self._replicas)
        keys = [node_key(member.node_id) for member in ring.members]
        healthy = np.array(
            [
                m.state is State.ALIVE and key != self._own_key
                for m, key in zip(ring.members, keys, strict=True)
            ],
            bool,
        )
        own_index = keys.index(self._own_key) if self._own_key in keys else -2
        self._shard.set_view(keys, [member.boot_epoch for member in ring.members])
        self._route = _Route(ring, own_index, healthy)

    @property
    def ring(self) -> Ring:
        """The ring that requests go by now."""
        return self._route.ring

    def get(self, keys: Keys, deadline: float) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Look up where pages lie.

        Returns ``(n,)`` 1 for those found at an owner that is in the view, and ``(n, 64)`` raw locations, undefined
        where not found.
        """
        found, raw = self._shard.get(keys)
        rows = np.flatnonzero(found == 0)
        self._metrics.looked_up_pages.labels("own_shard").inc(len(keys) - len(rows))
        if len(rows):
            self._metrics.looked_up_pages.labels("peers").inc(len(rows))
            locations: Locations = raw.view(LOCATION).reshape(len(keys))
            self._get_remote(keys, rows, (found, locations), deadline)
            found = self._shard.keep_present(raw, found)
        return found, raw

    def _get_remote(
        self, keys: Keys, rows: Rows, result: tuple[NDArray[np.uint8], Locations], deadline: float
    ) -> None:
        found, locations = result

        def take(asked: Rows, reply: Reply) -> Mask:
            hits, there = _unpack_found(reply.body, len(asked))
            found[asked[hits]] = 1
            locations[asked[hits]] = there
            return hits

        self._ask_owners(Kind.GET, rows, keys[rows], lambda part: keys[part].tobytes(), take, deadline)

    def put(self, keys: Keys, locations: Locations, deadline: float) -> Mask:
        """Store where pages lie. Returns a mask of the pages that at least one owner has acknowledged."""
        entries = np.empty(len(keys), PUT_ENTRY)
        entries["key"] = keys
        entries["sequence"] = next(self._sequences)
        entries["location"] = locations
        route = self._route
        owners = route.ring.owners(keys)
        acked: Mask = (owners == route.own_index).any(axis=1)
        if acked.any():
            self._shard.put(entries[acked].tobytes())

        def take(asked: Rows, reply: Reply) -> Mask:
            acked[asked] = True
            return np.zeros(len(asked), bool)  # one acknowledgement is enough, but every owner should have it

        rows = np.arange(len(keys))
        self._ask_owners(Kind.PUT, rows, keys, lambda part: entries[part].tobytes(), take, deadline)
        for index in np.unique(owners):
            if index >= 0 and index != route.own_index and not route.healthy[index]:
                self.on_missed(route.ring.members[index].node_id)
        return acked

    def drop(self, keys: Keys, locations: Locations, deadline: float, *, by_owner: bool) -> None:
        """Delete the entries that still are the ones named; ``by_owner`` if this node published them."""
        entries = np.empty(len(keys), DROP_ENTRY)
        entries["key"] = keys
        entries["sequence"] = next(self._sequences) if by_owner else 0
        for field in ("owner", "boot", "generation"):
            entries[field] = locations[field]
        self._shard.drop(entries.tobytes())

        def take(asked: Rows, reply: Reply) -> Mask:
            return np.zeros(len(asked), bool)

        rows = np.arange(len(keys))
        self._ask_owners(Kind.DROP, rows, keys, lambda part: entries[part].tobytes(), take, deadline)

    def _ask_owners(
        self,
        kind: Kind,
        rows: Rows,
        keys: Keys,
        body: Callable[[Rows], bytes],
        take: Callable[[Rows, Reply], Mask],
        deadline: float,
    ) -> None:
        """Send ``rows`` to their owners in parallel and hand each good reply to ``take``.

        ``take`` returns a mask of the asked rows that need no further answer. Returns when no row needs one, or
        when the silent have had their time.
        """
        route = self._route
        asks = _split(route, route.ring.owners(keys), rows)
        if not asks:
            return
        requests = [
            Request(member.address, kind, body(part), len(part), member.boot_epoch) for member, part in asks
        ]
        tally = _Tally(route, keys, rows)
        with self._client.send(requests) as calls:
            silent = self._collect(calls, [part for _, part in asks], tally, take, deadline)
        for index in silent:
            self._metrics.silent_owners.inc()
            if kind is Kind.PUT:
                self.on_missed(asks[index][0].node_id)

    def _collect(
        self,
        calls: Calls,
        parts: list[Rows],
        tally: _Tally,
        take: Callable[[Rows, Reply], Mask],
        deadline: float,
    ) -> set[int]:
        """Take replies until ``tally`` is settled; return the indexes of the asks that got no good one."""
        for part in parts:
            tally.waiting[tally.index(part)] += 1
        unanswered = set(range(len(parts)))
        patience = time.monotonic() + SILENT_OWNER_S
        while not tally.settled():
            now = time.monotonic()
            if now >= deadline or (now >= patience and tally.heard()):
                break
            until = min(deadline, patience) if now < patience else deadline
            answer = calls.next(until - now)
            if answer is None:
                continue
            index, reply = answer
            at = tally.index(parts[index])
            tally.waiting[at] -= 1
            if reply.ok and reply.count == len(parts[index]):
                unanswered.discard(index)
                tally.answered[at] = True
                tally.done[at] |= take(parts[index], reply)
        return unanswered


class _Tally:
    """Which rows of a call still need an answer."""

    def __init__(self, route: _Route, keys: Keys, rows: Rows) -> None:
        self._rows = rows
        self.waiting = np.zeros(len(rows), np.int32)  # owners asked that have not answered
        self.done = np.zeros(len(rows), bool)
        self.answered: Mask = (route.ring.owners(keys) == route.own_index).any(axis=1)

    def index(self, part: Rows) -> Rows:
        """Return where the rows of ``part`` stand in this tally; both are sorted."""
        where: Rows = np.searchsorted(self._rows, part)
        return where

    def settled(self) -> bool:
        return bool((self.done | (self.waiting == 0)).all())

    def heard(self) -> bool:
        """Whether for every row some owner has spoken, so that the silent need not be waited for."""
        return bool((self.done | self.answered | (self.waiting == 0)).all())


def _unpack_found(body: bytes, n: int) -> tuple[Mask, Locations]:
    """Read the answer to a get of ``n`` keys; one of a wrong length finds nothing."""
    hits = np.frombuffer(body, np.uint8, min(n, len(body))).astype(bool)
    n_hits = int(hits.sum())
    if len(body) != n + n_hits * LOCATION.itemsize:
        return np.zeros(n, bool), np.empty(0, LOCATION)
    return hits, np.frombuffer(body, LOCATION, n_hits, n)


def _split(route: _Route, owners: Owners, rows: Rows) -> list[tuple[Member, Rows]]:
    """Return whom to ask for which rows, at most :data:`MAX_ENTRIES` a request."""
    asks = []
    for index in np.unique(owners):
        if index < 0 or not route.healthy[index]:
            continue
        part = rows[(owners == index).any(axis=1)]
        asks += [
            (route.ring.members[index], part[i : i + MAX_ENTRIES]) for i in range(0, len(part), MAX_ENTRIES)
        ]
    return asks
