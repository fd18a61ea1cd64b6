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
from p2pkv.control import ControlClient, Request
from p2pkv.directory.ring import Ring
from p2pkv.directory.view import State, View, node_key
from p2pkv.metrics import Metrics
from p2pkv.page import Keys, Locations
from p2pkv.wire import DROP_ENTRY, PUT_ENTRY, Kind, Reply

SILENT_OWNER_S = 0.020
"""Twenty round trips on a busy machine, and no more than a fetch may lose to a peer that has stopped."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Route:
    """What one view means for requests. Never changes, so a call uses one route from beginning to end."""

    ring: Ring
    table: _native.RingTable


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
        self._shard.set_view(keys, [member.boot_epoch for member in ring.members])
        is_healthy = np.array([member.state is State.ALIVE for member in ring.members], np.uint8)
        own_index = keys.index(self._own_key) if self._own_key in keys else -1
        self._route = _Route(ring, _native.RingTable(ring.points, ring.successors, is_healthy, own_index))

    @property
    def ring(self) -> Ring:
        """The ring that requests go by now."""
        return self._route.ring

    def get(self, keys: Keys, deadline: float) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Look up where pages lie.

        Returns ``(n,)`` 1 for those found at an owner that is in the view, and ``(n, 64)`` raw locations, undefined
        where not found.
        """
        found, locations = self._shard.get(keys)
        n_own = int(found.sum())
        self._metrics.count(self._metrics.looked_up_pages, "own_shard", n_own)
        if n_own < len(keys):
            self._metrics.count(self._metrics.looked_up_pages, "peers", len(keys) - n_own)
            route = self._route
            ask = _native.AskBatch(keys, found, route.table)

            def take(index: int, reply: Reply) -> None:
                ask.take_found(index, reply.body, found, locations)

            self._ask_owners(route, Kind.GET, (ask, keys), take, deadline)
            found = self._shard.keep_present(locations, found)
        return found, locations

    def put(self, keys: Keys, locations: Locations, deadline: float) -> Mask:
        """Store where pages lie. Returns a mask of the pages that at least one owner has acknowledged."""
        entries = np.empty(len(keys), PUT_ENTRY)
        entries["key"] = keys
        entries["sequence"] = next(self._sequences)
        entries["location"] = locations
        route = self._route
        ask = _native.AskBatch(keys, None, route.table)
        own = ask.answered().view(bool)
        if own.any():
            self._shard.put(entries[own].tobytes())
        silent = self._tell_owners(route, Kind.PUT, ask, entries, deadline)
        for index in {*silent, *ask.passed_over()}:
            self.on_missed(route.ring.members[index].node_id)
        return ask.answered().view(bool)

    def drop(self, keys: Keys, locations: Locations, deadline: float, *, by_owner: bool) -> None:
        """Delete the entries that still are the ones named; ``by_owner`` if this node published them."""
        entries = np.empty(len(keys), DROP_ENTRY)
        entries["key"] = keys
        entries["sequence"] = next(self._sequences) if by_owner else 0
        for field in ("owner", "boot", "generation"):
            entries[field] = locations[field]
        self._shard.drop(entries.tobytes())
        route = self._route
        self._tell_owners(route, Kind.DROP, _native.AskBatch(keys, None, route.table), entries, deadline)

    def _tell_owners(
        self, route: _Route, kind: Kind, ask: _native.AskBatch, entries: NDArray[np.void], deadline: float
    ) -> list[int]:
        """Send each owner its entries; return the members that did not acknowledge them."""
        records = entries.view(np.uint8).reshape(len(entries), -1)
        self._ask_owners(route, kind, (ask, records), lambda index, _: ask.acknowledge(index), deadline)
        return ask.silent()

    def _ask_owners(
        self,
        route: _Route,
        kind: Kind,
        question: tuple[_native.AskBatch, NDArray[np.uint8]],
        take: Callable[[int, Reply], None],
        deadline: float,
    ) -> None:
        """Send each owner its records in parallel and hand good replies to ``take``.

        Returns when no key needs another answer, or when those who are silent have had their time.
        """
        ask, records = question
        members = route.ring.members
        requests = [
            Request(members[owner].address, kind, ask.body(index, records), n, members[owner].boot_epoch)
            for index, (owner, n) in enumerate(ask.asks())
        ]
        patience = time.monotonic() + SILENT_OWNER_S
        with self._client.send(requests) as calls:
            while not ask.is_settled():
                now = time.monotonic()
                if now >= deadline or (now >= patience and ask.is_heard()):
                    break
                until = min(deadline, patience) if now < patience else deadline
                answer = calls.next(until - now)
                if answer is None:
                    if not calls.are_pending():
                        break
                    continue
                index, reply = answer
                if reply.ok and reply.count == requests[index].count:
                    take(index, reply)
                else:
                    ask.refuse(index)
        self._metrics.silent_owners.inc(len(ask.silent()))
