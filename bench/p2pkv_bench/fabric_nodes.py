"""The directory of a thousand nodes in one process and virtual time: real shards, pools, clients and announcers.

Every request is the one that a node would send, encoded, and answered by the shard's native code; every entry lies in a
real shard. What is not real is the way between them, which loses nothing and takes a millisecond, the threads, whose
turns are taken one after another, and membership: all hear of a change at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import numpy as np

from p2pkv import _native
from p2pkv.control.sockets import Request
from p2pkv.control.wire import Kind
from p2pkv.directory.announcer import Announcer
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.ring import NOBODY, Ring
from p2pkv.directory.view import Member, View
from p2pkv.metrics import Metrics
from p2pkv.page import Keys, Locations, as_locations, row_pieces
from p2pkv.pool import Pool
from p2pkv.testing.simulated_directory import NoChannels, SimulatedControl
from p2pkv.testing.simulated_network import SimulatedClock
from p2pkv_bench.errors import BenchError

REPLICAS = 2
PAGE_NBYTES = 64
"""As small as may be: what a page costs the directory does not depend on it."""
_MOST_ENTRIES = 1 << 26
"""A shard has room for so many, as it has in nodes."""
_TICK_S = 0.1
"""A node sweeps its shard as often."""
_IDLE_TICK_S = 0.5
_CONFIRM_TICKS = 5
NEVER_S = 1e9
"""That which nodes check by and by would hide what was not put when it should have been."""
_SETTLE_S = 120.0
_BATCH = 1000


@dataclass(slots=True)
class Traffic:
    """It counts what was asked, by kinds of requests, since it was begun anew."""

    requests: Counter[Kind] = field(default_factory=Counter)
    records: Counter[Kind] = field(default_factory=Counter)
    nbytes: Counter[Kind] = field(default_factory=Counter)
    """They are those of requests and answers, headers included; what encrypts and frames them is not counted."""
    served_ns: Counter[Kind] = field(default_factory=Counter)
    """Processor time of the shards that answered."""
    asking_ns: int = 0
    """Processor time of those who looked up, without the shards'; encoding in Python, as over the control socket."""
    puts_at: Counter[str] = field(default_factory=Counter)
    """Requests to put that each member answered, by its address."""

    @property
    def all_served_ns(self) -> int:
        """The same, whatever was asked."""
        return sum(self.served_ns.values())


class FabricControl(SimulatedControl):
    """The way from one node to all shards, which counts what goes over it."""

    def __init__(self, fabric: Fabric, clock: SimulatedClock) -> None:
        super().__init__(fabric.reach, clock)
        self._fabric = fabric

    def _exchange(self, shard: _native.Shard, boot: int, request: Request, message: bytes) -> bytes:
        traffic = self._fabric.traffic
        began = time.thread_time_ns()
        answer = super()._exchange(shard, boot, request, message)
        traffic.served_ns[request.kind] += time.thread_time_ns() - began
        traffic.requests[request.kind] += 1
        traffic.records[request.kind] += request.count
        traffic.nbytes[request.kind] += len(message) + len(answer)
        traffic.puts_at[request.address] += request.kind is Kind.PUT
        return answer


class FabricNode:
    """A member: what it holds of the directory, what it has published, and what keeps the one true to the other."""

    def __init__(self, fabric: Fabric, member: Member, n_pages: int, check_s: float) -> None:
        self._fabric = fabric
        self.member = member
        self.clock = SimulatedClock(fabric.now)
        self.shard = _native.Shard(_MOST_ENTRIES)
        self.shard.set_time(int(fabric.now))
        nbytes = max(1, n_pages) * PAGE_NBYTES
        self.pool = Pool(nbytes, owner=member.key, boot=member.boot_epoch, granule=PAGE_NBYTES)
        self.shard.serve_held(self.pool.native)
        self.directory = DirectoryClient(
            own_key=member.key,
            shard=self.shard,
            client=FabricControl(fabric, self.clock),
            channels=NoChannels(),
            replicas=REPLICAS,
            metrics=fabric.metrics,
            clock=self.clock,
            others=fabric.others,
        )
        random = Random(f"{fabric.seed}/{member.node_id}")  # noqa: S311 - jitter, nothing secret
        self.announcer = Announcer(
            self.pool, self.directory, fabric.metrics, check_s=check_s, clock=self.clock, random=random
        )
        self.directory.on_missed = self.announcer.owe
        self.next_step = fabric.now
        self.view_ns = 0
        """Processor time that the last view took this node."""
        self.step_ns = 0
        """It is the same of what its announcer has done since, without the shards' part."""

    def publish(self, keys: Keys) -> None:
        """Have pages under these keys in the pool; the directory is not told."""
        memory = np.zeros((_BATCH, PAGE_NBYTES), np.uint8)
        for first in range(0, len(keys), _BATCH):
            some = keys[first : first + _BATCH]
            if self.pool.publish(some, row_pieces(memory[: len(some)])).n_readable != len(some):
                raise BenchError("a pool has not taken its pages")

    def pages(self, limit: int = 1 << 14) -> Iterator[Keys]:
        """Yield the keys of what is published here, ``limit`` at a time."""
        cursor = 0
        while True:
            keys, _, cursor = self.pool.list(cursor, limit)
            yield keys
            if cursor == 0:
                return

    def follow(self, view: View) -> None:
        """Go by this view."""
        self.clock.now = max(self.clock.now, self._fabric.now)
        began = time.thread_time_ns()
        self.directory.set_view(view)
        self.announcer.ring_changed()
        self.view_ns, self.step_ns = time.thread_time_ns() - began, 0
        self.next_step = self._fabric.now

    def confirm(self, now: float) -> None:
        """Say that the view is up to date."""
        self.clock.now = max(self.clock.now, now)
        self.directory.confirm_view()

    def step(self, now: float) -> None:
        """Take the announcer's turns until ``now``; nothing is evicted here, so that there is nothing else to tell."""
        while self.next_step <= now:
            self.clock.now = max(self.clock.now, self.next_step)
            began = time.thread_time_ns() - self._fabric.traffic.all_served_ns
            wait = self.announcer.step()
            self.step_ns += time.thread_time_ns() - self._fabric.traffic.all_served_ns - began
            self.next_step = self.clock.now + wait

    def look_up(self, keys: Keys) -> tuple[int, Locations]:
        """Look pages up as a fetch does; return how many were found, and where the found ones lie."""
        self.clock.now = max(self.clock.now, self._fabric.now)
        traffic = self._fabric.traffic
        began = time.thread_time_ns() - traffic.all_served_ns
        found, raw = self.directory.get(keys, self.clock.now + 1.0)
        traffic.asking_ns += time.thread_time_ns() - traffic.all_served_ns - began
        return int(found.sum()), as_locations(raw[found.astype(bool)])

    def close(self) -> None:
        """Release what it has."""
        self.announcer.close()
        self.shard.serve_held(None)
        self.pool.release_memory()
        # who is called when something is missed is what knows the pool: without a circle it goes at once
        self.directory.on_missed = lambda node_id, keys: None


class Fabric:
    """All nodes, and time."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 1000.0
        self.nodes: dict[str, FabricNode] = {}
        """The living, by their ids."""
        self.metrics = Metrics()
        self.others = _native.OtherHolders(1 << 10)
        self.traffic = Traffic()
        self._by_address: dict[str, FabricNode] = {}
        self._holders: list[FabricNode] = []
        """Those that have, or had, a seat: nothing is to be swept at the others."""
        self._n_ticks = 0

    def count_anew(self) -> Traffic:
        """Begin to count; return what is counted into from now on."""
        self.traffic = Traffic()
        return self.traffic

    def add(self, member: Member, n_pages: int = 0, *, check_s: float = NEVER_S) -> FabricNode:
        """Have one more node, with room for so many pages; nobody hears of it yet."""
        node = FabricNode(self, member, n_pages, check_s)
        self.nodes[member.node_id] = self._by_address[member.address] = node
        return node

    def lose(self, node_ids: list[str]) -> None:
        """Have nodes no more, as kill -9 ends them; nobody hears of it yet."""
        for node_id in node_ids:
            node = self.nodes.pop(node_id)
            del self._by_address[node.member.address]
            self._holders = [holder for holder in self._holders if holder is not node]
            node.close()

    def reach(self, address: str) -> tuple[_native.Shard, int] | None:
        """Return the shard that answers at an address."""
        node = self._by_address.get(address)
        return None if node is None else (node.shard, node.member.boot_epoch)

    def ring(self) -> Ring:
        """Return the ring of those that live, made anew: what nodes go by is compared with it."""
        return Ring([node.member for node in self.nodes.values()], REPLICAS)

    def tell(self) -> None:
        """Have everybody hear of what has come and gone."""
        view = View(node.member for node in self.nodes.values())
        for node in self.nodes.values():
            node.follow(view)
        ring = self.ring()
        seats = [
            self.nodes[ring.members[index].node_id] for index in np.unique(ring.successors) if index != NOBODY
        ]
        self._holders += [node for node in seats if node not in self._holders]

    def run(self, seconds: float) -> None:
        """Let time pass for all."""
        for now in self._moments(seconds, _TICK_S):
            self._sweep()
            for node in self.nodes.values():
                node.step(now)

    def sweep(self, seconds: float) -> None:
        """Let time pass in which announcers do nothing."""
        for now in self._moments(seconds, _TICK_S):
            self._sweep()
            for node in self.nodes.values():
                node.next_step = max(node.next_step, now)

    def idle(self, seconds: float, active: list[FabricNode]) -> None:
        """Let time pass in which these do something, and the others only answer; shards are not swept."""
        for now in self._moments(seconds, _IDLE_TICK_S):
            for node in active:
                node.step(now)
        for node in self.nodes.values():
            node.next_step = max(node.next_step, self.now)

    def _moments(self, seconds: float, tick: float) -> Iterator[float]:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + tick)
            yield self.now

    def _sweep(self) -> None:
        self._n_ticks += 1
        is_confirmed = self._n_ticks % _CONFIRM_TICKS == 0
        for node in self.nodes.values():
            node.shard.set_time(int(self.now))
            if is_confirmed:
                node.confirm(self.now)
        for node in self._holders:
            node.shard.sweep()

    def settle(self) -> None:
        """Let time pass until a second has gone by in which nobody has put anything."""
        until = self.now + _SETTLE_S
        before = -1
        while self.traffic.requests[Kind.PUT] != before:
            before = self.traffic.requests[Kind.PUT]
            self.run(1.0)
            if self.now > until:
                raise BenchError(f"entries are still put after {_SETTLE_S:g} s")

    def close(self) -> None:
        """Release everything."""
        self.lose(list(self.nodes))


def lacking(fabric: Fabric) -> int:
    """Return how many entries are not where they should be, each page's at each owner, by what the shards find."""
    ring = fabric.ring()
    shards = [fabric.nodes[member.node_id].shard for member in ring.members]
    n_lacking = 0
    for node in fabric.nodes.values():
        for keys in node.pages():
            if not len(keys):
                continue
            owners = ring.owners(keys).ravel()
            order = np.argsort(owners, kind="stable")
            indexes, firsts = np.unique(owners[order], return_index=True)
            for index, rows in zip(indexes, np.split(order // ring.replicas, firsts[1:]), strict=True):
                if index != NOBODY:
                    found, raw = shards[index].get(keys[rows])
                    is_there = found.astype(bool) & (as_locations(raw)["owner"] == node.member.key)
                    n_lacking += len(rows) - int(is_there.sum())
    return n_lacking
