"""Whole nodes in one thread and virtual time: membership, shard, directory and announcer, and all that can befall them.

The Python code and the native shard and pool are the real ones; network, clocks and threads are simulated. A held
interpreter runs no Python, but its shard and its probes go on answering, as in life.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np

from p2pkv import _native
from p2pkv.control.sockets import Request
from p2pkv.control.wire import Kind, Reply
from p2pkv.directory.announcer import Announcer
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.look_up import FEW
from p2pkv.directory.membership.base import Identity, Listeners
from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.directory.membership.timing import Timing
from p2pkv.directory.view import View, node_key
from p2pkv.metrics import Metrics
from p2pkv.page import Keys, as_locations, row_pieces
from p2pkv.pool import Pool
from p2pkv.testing.simulated_directory import NoChannels, SimulatedControl
from p2pkv.testing.simulated_network import LATENCY, SimulatedClock, SimulatedNetwork, Simulation

NBYTES = 4096
MOST_PAGES = 32
"""Of a pool: what comes beyond evicts."""
TICK_S = 0.1
EFFECTS = {
    "suspicions": "p2pkv_membership_suspicions_total",
    "deaths": "p2pkv_membership_deaths_total",
    "late rounds": "p2pkv_membership_late_rounds_total",
    "reboots": "p2pkv_membership_reboots_total",
}
"""What nodes feel of what befalls them, and the counters that tell it."""
_PAGES = np.zeros((MOST_PAGES, NBYTES), np.uint8)


class WorldControl(SimulatedControl):
    """The way to other nodes' shards: what one direction of a broken link lets through has happened."""

    def __init__(self, node: WorldNode) -> None:
        super().__init__(lambda address: None, node.clock)
        self._node = node
        self.is_starved = False
        """Whether this node has no descriptor left to ask anybody."""
        self.n_entries_put = 0

    def _answer(self, request: Request) -> Reply | None:
        simulation, network = self._node.world.simulation, self._node.network
        holder = None if self.is_starved else simulation.hearing(network, request.address)
        if holder is None:
            return None
        if request.kind is Kind.PUT:
            self.n_entries_put += request.count
        peer = self._node.world.at(holder)
        self._reach = lambda address: (peer.shard, peer.network.reply().boot_epoch)
        reply = super()._answer(request)
        return reply if simulation.is_open(holder, network) else None


class WorldNode:
    """One process."""

    def __init__(
        self, world: World, node_id: str, address: str, *, join: Sequence[str], off_s: float
    ) -> None:
        self.world = world
        self.node_id = node_id
        self.address = address
        self.network: SimulatedNetwork = world.simulation.network(address)
        self.network.clock.wall_offset_ns += int(off_s * 1e9)
        self.clock = SimulatedClock(world.now)  # of the threads that are not membership's
        self.expelled = ""
        self.was_expelled = ""
        """Why it was last, also when it is a member again."""
        self.n_changes = 0
        self._may_evict = False
        self.next_step = world.now
        self.shard = _native.Shard(1 << 12)
        self.shard.set_time(int(world.now))
        self.metrics = Metrics()
        self.control = WorldControl(self)
        self.directory = DirectoryClient(
            own_key=node_key(node_id),
            shard=self.shard,
            client=self.control,
            channels=NoChannels(),
            replicas=2,
            metrics=self.metrics,
            clock=self.clock,
            few=world.random.choice([0, FEW]),  # those with 0 ask holders first, as in a cluster of many
        )
        self.announcer: Announcer | None = None
        self.engine = EmbeddedMembership(
            self.network,
            Identity(node_id, {"tcp": "net"}),
            join=join,
            listeners=Listeners(self._changed, self._resurrected, self._expelled, self._rebooted),
            clock=self.network.clock,
            timing=Timing(take_back=2.4),  # as long as a death, so that schedules stay short
            random=Random(world.random.getrandbits(64)),
        )
        try:
            world.simulation.enter(self.network, self.engine)
        except BaseException:
            world.simulation.kill(self.network)
            raise
        self.pool = Pool(MOST_PAGES * NBYTES, owner=node_key(node_id), boot=self.engine.boot_epoch)
        self.shard.serve_held(self.pool.native)
        self.announcer = Announcer(self.pool, self.directory, self.metrics, clock=self.clock)
        self.directory.on_missed = self.announcer.owe

    # what happens to it

    def _changed(self, old: View, new: View) -> None:
        self.n_changes += 1
        self.clock.now = max(self.clock.now, self.network.clock.now)
        self.directory.set_view(new)
        if self.announcer is not None:
            self.announcer.ring_changed()
            self.next_step = 0.0

    def _resurrected(self) -> None:
        if self.announcer is not None:
            self.announcer.owe_everything()
            self.next_step = 0.0

    def _expelled(self, reason: str) -> None:
        self.expelled = self.was_expelled = reason
        self._changed(self.engine.view(), View())

    def _rebooted(self, boot: int) -> None:
        self.expelled = ""
        if self.announcer is not None:
            self.pool.set_boot(boot)
            self._resurrected()

    @property
    def is_running(self) -> bool:
        """Whether it runs Python now."""
        return not self.network.is_stopped and self.network.held_until <= self.world.now

    def tick(self) -> None:
        """Do what its threads do in a tenth of a second."""
        now = self.world.now
        if self.network.is_stopped:
            return
        self.shard.set_time(int(now))
        self.shard.sweep()
        if not self.is_running or self.announcer is None or self.expelled:
            return
        self.clock.now = max(self.clock.now, now)
        if self._may_evict:  # draining an empty log gives the processor away
            self._may_evict = False
            self.announcer.tell_changed(idle=0.0, gather=0.0)
        while self.next_step <= self.world.now:
            self.next_step = self.clock.now + self.announcer.step()
            self.clock.now = max(self.clock.now, self.next_step if self.next_step < now + TICK_S else now)

    # what it does

    def publish(self, keys: Keys) -> int:
        """Publish pages; return how many anybody could fetch then."""
        self.clock.now = max(self.clock.now, self.world.now)
        self._may_evict = True
        pieces = row_pieces(_PAGES[: len(keys)])
        told = self.directory.publish(self.pool, keys, pieces, self.clock.now + 1.0)
        return int(told.is_told.sum())

    def retract(self, keys: Keys) -> None:
        """Take pages back."""
        mask, locations = self.pool.retract(keys)
        gone = mask.astype(bool)
        if gone.any():
            self.clock.now = max(self.clock.now, self.world.now)
            self.directory.drop(keys[gone], locations[gone], self.clock.now + 1.0, by_owner=True)

    def pages(self) -> Keys:
        """Return the keys of what its pool holds."""
        keys, _, _ = self.pool.list(0, 4096)
        return keys

    def look_up(self, keys: Keys) -> tuple[np.ndarray, np.ndarray]:
        """Return which keys are found, and their locations."""
        self.clock.now = max(self.clock.now, self.world.now)
        found, raw = self.directory.get(keys, self.clock.now + 1.0)
        return found.astype(bool), as_locations(raw)

    def close(self) -> None:
        """Release what it has; the others get no word."""
        self.shard.serve_held(None)
        if self.announcer is not None:
            self.announcer.close()
            # the memory of a pool goes with the last who knows it: now, and not when garbage is collected
            self.directory.on_missed = lambda node_id: None
            self.announcer = None
            del self.pool


class World:
    """All nodes, living and expelled, and time."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.simulation = Simulation()
        self.nodes: list[WorldNode] = []
        self._counted: Counter[str] = Counter()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self.simulation.now

    def at(self, network: SimulatedNetwork) -> WorldNode:
        """Return the node of a network."""
        return next(node for node in self.nodes if node.network is network)

    def start(self, node_id: str, address: str, *, join: Sequence[str], off_s: float = 0.0) -> WorldNode:
        """Start a process; raises what its membership raises."""
        node = WorldNode(self, node_id, address, join=join, off_s=off_s)
        self.nodes.append(node)
        return node

    def end(self, node: WorldNode, *, says_so: bool) -> None:
        """End a process: as kill -9 does, or as one that leaves."""
        if says_so and not node.expelled:
            node.engine.close()
        self.simulation.kill(node.network)
        self.nodes.remove(node)
        self._count(node)
        node.close()

    def run(self, seconds: float) -> None:
        """Let time pass for everybody."""
        until = self.now + seconds
        while self.now < until:
            self.simulation.run(min(TICK_S, until - self.now))
            for node in self.nodes:
                node.tick()

    def calm(self) -> None:
        """End whatever is wrong with network, interpreters and descriptors."""
        self.simulation.heal()
        for node in self.nodes:
            node.control.is_starved = False
            node.network.answers_in = LATENCY
            if node.network.is_stopped or node.network.held_until > self.now:
                self.simulation.resume(node.network)
            node.network.held_until = -math.inf

    def counted(self) -> Counter[str]:
        """Return how often each of :data:`EFFECTS` was felt, by the living and by those who have ended."""
        for node in self.nodes:
            self._count(node)
        return self._counted

    def _count(self, node: WorldNode) -> None:
        counts = node.engine.counters()
        self._counted.update({effect: counts[name] for effect, name in EFFECTS.items()})

    def close(self) -> None:
        """Release everything."""
        for node in self.nodes:
            node.close()
        self.nodes.clear()
