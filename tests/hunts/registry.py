"""Nodes that find each other by records in a store, while both the nodes and the store have every fault.

The store is away, for all or for one; it forgets its history, ends streams and leases, tells late, twice and out of
order, or says nothing any more; whoever can write to it deletes records, puts old ones back and makes up new ones. The
oracle is asked all the time whether anybody is in a view who never was a node, or is back in one whose process has
ended; and some seconds after the last fault, whether all views are the truth, and every node's record is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv.control.secret import ClusterKeys
from p2pkv.directory.registry.follower import QUIET_S
from p2pkv.directory.registry.seal import Seal
from p2pkv.directory.view import DEFAULT_CLUSTER, Member
from p2pkv.errors import DuplicateNodeError, RegistryError
from p2pkv.testing.simulated_cluster import SimulatedCluster, SimulatedNode
from p2pkv.testing.simulated_registry import (
    TTL,
    SimulatedRegisteredMembership,
    server_of,
    simulation_seal,
)

SETTLE_S = 18.0
"""From the end of the last fault to the judgement: a pause of who follows, a record's longest wait, a death."""
FORGOTTEN_S = 5.0
"""A process that ended so long ago is in no newcomer's view, unless another node that still believes in it says so."""
FORGED = 2**62
"""The boot that strangers make up: above any that a clock gives."""
_MOST_NODES = 6
_SLICE_S = 0.5
_HOUR_NS = 3600 * 10**9
_EFFECTS = {
    "records lost": "p2pkv_registry_lost_records_total",
    "records refused": "p2pkv_registry_refused_records_total",
    "failed calls": "p2pkv_registry_failures_total",
    "deaths": "p2pkv_membership_deaths_total",
}


@dataclass(eq=False)
class Process:
    """One node's process, and when it ended."""

    node: SimulatedNode
    ended: float | None = None


@dataclass
class Schedule:
    """One store, its nodes, and their history."""

    random: Random
    tally: Tally
    cluster: SimulatedCluster = field(init=False)
    processes: list[Process] = field(default_factory=list)
    boots: dict[tuple[str, int], Process] = field(default_factory=dict)
    """Every boot that ever was, and whose."""
    believed: dict[SimulatedNode, set[tuple[str, int]]] = field(default_factory=dict)
    known: dict[SimulatedNode, set[tuple[str, int]]] = field(default_factory=dict)
    """What each believed last, but for those that are expelled: what they had believed before."""
    dozed: dict[SimulatedNode, float] = field(default_factory=dict)
    """When a node was last seen not to run."""
    twins: set[SimulatedNode] = field(default_factory=set)
    story: list[str] = field(default_factory=list)
    n_started: int = 0

    def __post_init__(self) -> None:
        self.cluster = SimulatedCluster(SimulatedRegisteredMembership, seed=self.random.getrandbits(32))
        self.server = server_of(self.cluster.simulation)
        self.seal = simulation_seal(DEFAULT_CLUSTER)
        self.liar = Seal(ClusterKeys(b"", b"another secret"), DEFAULT_CLUSTER)

    @property
    def now(self) -> float:
        return self.cluster.simulation.now

    def note(self, what: str) -> None:
        self.story.append(f"{self.now:6.1f} s: {what}")

    def broken(self, what: str) -> Broken:
        return Broken("\n".join([what, *self.story]))

    def up(self) -> list[SimulatedNode]:
        """Return the nodes whose processes are there."""
        return [process.node for process in self.processes if process.ended is None]

    def some(self) -> SimulatedNode | None:
        up = self.up()
        return self.random.choice(up) if up else None

    def some_name(self) -> str:
        return f"n{self.random.randrange(_MOST_NODES)}"

    # what befalls the nodes

    def start(self, node_id: str, *, off_ns: int = 0) -> None:
        self.n_started += 1
        address = f"h{self.n_started}:7000"
        same = [node for node in self.up() if node.node_id == node_id]
        try:
            node = self.cluster.start(node_id, address, wall_offset_ns=1_700_000_000_000_000_000 + off_ns)
        except RegistryError as error:
            if self.server.is_up and node_id not in self.server.cut_off:
                raise self.broken(f"{node_id} does not start, though the store answers: {error}") from error
            self.note(f"{node_id} does not start: {error}")
            self.tally["refused starts"] += 1
        except DuplicateNodeError:
            self.note(f"{node_id} at {address} is refused")
            if not same:
                raise self.broken(f"{node_id} is refused, and nobody has its id") from None
        else:
            self.note(f"{node_id} starts at {address}, boot {node.engine.boot_epoch}")
            self.processes.append(Process(node))
            self.boots[node_id, node.engine.boot_epoch] = self.processes[-1]
            self.twins.update([node, *same] if same else ())

    def come(self) -> None:
        there = {node.node_id for node in self.up()}
        absent = [f"n{i}" for i in range(_MOST_NODES) if f"n{i}" not in there]
        for node_id in self.random.sample(absent, min(len(absent), self.random.choice([1, 1, 2, 3]))):
            self.start(node_id, off_ns=self.random.choice([0, 0, -_HOUR_NS, _HOUR_NS]))

    def end(self, *, says_so: bool) -> SimulatedNode | None:
        node = self.some()
        if node is None or len(self.up()) < 2 or (says_so and node.network.is_stopped):
            return None
        self.note(f"{node.node_id} {'leaves' if says_so else 'is killed'}")
        if says_so:
            node.engine.close()  # type: ignore[attr-defined]  # of every membership
        self.count(node)
        self.cluster.kill(node)
        next(process for process in self.processes if process.node is node).ended = self.now
        self.believed.pop(node, None)
        return node

    def kill(self) -> None:
        self.end(says_so=False)

    def leave(self) -> None:
        self.end(says_so=True)

    def restart(self) -> None:
        node = self.end(says_so=False)
        if node is not None:
            self.start(node.node_id, off_ns=self.random.choice([0, 0, -_HOUR_NS, _HOUR_NS]))

    def replace(self) -> None:
        """Stop a process, and start its node elsewhere."""
        node = self.some()
        if node is not None:
            self.note(f"{node.node_id} is stopped, to be started elsewhere")
            self.cluster.simulation.stop(node.network)
            self.run(self.random.uniform(0.0, 40.0))
            self.start(node.node_id)

    def stop(self) -> None:
        node = self.some()
        if node is not None:
            self.note(f"{node.node_id} is stopped")
            self.cluster.simulation.stop(node.network)

    def go_on(self) -> None:
        for node in self.up():
            if node.network.is_stopped:
                self.note(f"{node.node_id} goes on")
                self.cluster.simulation.resume(node.network)

    def hold(self) -> None:
        node = self.some()
        if node is not None and not node.network.is_stopped:
            seconds = self.random.choice([2.0, 12.0, TTL + 15.0])
            self.note(f"{node.node_id}'s interpreter is held for {seconds:.0f} s")
            self.cluster.simulation.hold_interpreter(node.network, seconds)

    def part(self) -> None:
        networks = [node.network for node in self.up()]
        self.random.shuffle(networks)
        at = self.random.randrange(len(networks) + 1)
        self.note(f"the network is parted: {[network.address for network in networks[:at]]} from the others")
        self.cluster.simulation.partition(networks[:at], networks[at:])

    def heal(self) -> None:
        self.note("the network heals")
        self.cluster.simulation.heal()

    # what befalls the store

    def away(self) -> None:
        self.server.is_up = not self.server.is_up
        self.note(f"the store is {'back' if self.server.is_up else 'away'}")

    def cut_off(self) -> None:
        name = self.some_name()
        self.server.cut_off ^= {name}
        self.note(f"{name} {'can not' if name in self.server.cut_off else 'can'} reach the store")

    def forget(self) -> None:
        self.note("the store forgets its history")
        self.server.compact()

    def break_watches(self) -> None:
        self.note("all streams end")
        self.server.break_watches()

    def deafen(self) -> None:
        name = self.some_name()
        self.note(f"{name}'s server tells it nothing any more")
        self.server.deaf.add(name)

    def be_late(self) -> None:
        self.server.lag = self.random.choice([0.0, 0.2, 2.0, 5.0])
        self.note(f"changes are told {self.server.lag} s late")

    def be_noisy(self) -> None:
        self.server.noise = None if self.server.noise else self.random
        self.note(f"changes come {'twice and out of order' if self.server.noise else 'in order'}")

    def lose_lease(self) -> None:
        name = self.some_name()
        self.note(f"the lease of {name} is lost")
        self.server.drop_lease(name, self.now)

    # what is written there by others

    def delete(self) -> None:
        name = self.some_name()
        self.note(f"somebody deletes {name}")
        self.server.write(name, None, self.now)

    def replay(self) -> None:
        """Put back what was there before, under its own name or another's."""
        if self.server.seen:
            name, value = self.random.choice(self.server.seen)
            name = self.random.choice([name, name, self.some_name()])
            self.note(f"an old record is put back as {name}")
            self.server.write(name, value, self.now)

    def lie(self) -> None:
        """Write what no node wrote: garbage, or a record by another secret."""
        name = self.random.choice([self.some_name(), f"liar{self.random.randrange(3)}"])
        node = self.some()
        address = node.network.address if node is not None else "h1:7000"
        forged = self.liar.close(Member(name, FORGED, address, weight=16.0))
        value = self.random.choice([forged, forged[:-1], b"", b"garbage", b"p2pkv\x02" + bytes(64)])
        self.note(f"a stranger writes {name}")
        self.server.write(name, value, self.now)

    def faults(self) -> tuple[list[Callable[[], None]], list[int]]:
        """Return what may happen, and how likely each is."""
        chances = {
            **dict.fromkeys([self.kill, self.hold, self.part, self.lie, self.replay, self.break_watches], 3),
            **dict.fromkeys(
                [self.leave, self.stop, self.heal, self.delete, self.lose_lease, self.cut_off], 2
            ),
            **dict.fromkeys(
                [self.restart, self.go_on, self.away, self.forget, self.be_late, self.be_noisy], 3
            ),
            self.come: 8,
            self.deafen: 2,
            self.replace: 1,
        }
        return list(chances), list(chances.values())

    # the oracle

    def run(self, seconds: float) -> None:
        """Let time pass, and look at all views meanwhile."""
        until = self.now + seconds
        while self.now < until:
            self.cluster.run(min(_SLICE_S, until - self.now))
            self.look()

    def look(self) -> None:
        """Nobody is in a view who never was a node; and nobody comes back into one whose process has ended."""
        for process in self.processes:
            if process.ended is None:
                own = (process.node.node_id, process.node.engine.boot_epoch)
                if own[1] >= FORGED:
                    raise self.broken(f"{own} heeds a stranger's record, and has a boot above that")
                self.boots[own] = process
                network = process.node.network
                if network.is_stopped or network.held_until >= self.now:
                    self.dozed[process.node] = self.now
        # what lay unread while a node dozed is news to it, and to whom it tells that
        is_stale_news_about = any(self.now - at <= FORGOTTEN_S for at in self.dozed.values())
        views = {
            node: {(m.node_id, m.boot_epoch) for m in node.engine.view().present()} for node in self.up()
        }
        for node, seen in views.items():
            # who was expelled, and comes back, goes on with what it knew, until it has asked for them
            before = self.believed.get(node) or self.known.get(node, set())
            for boot in seen - before:
                process = self.boots.get(boot)
                if process is None:
                    raise self.broken(f"{node.node_id} takes in {boot}, which never was a node")
                told = any(boot in others for other, others in self.believed.items() if other is not node)
                told = told or is_stale_news_about
                if process.ended is not None and self.now - process.ended > FORGOTTEN_S and not told:
                    raise self.broken(
                        f"{node.node_id} takes in {boot}, whose process has ended, by its record"
                    )
                self.tally["members taken in"] += 1
        self.believed = views
        self.known.update((node, seen) for node, seen in views.items() if seen)

    def settle(self) -> None:
        """End every fault, and ask for the truth."""
        self.note("all faults end")
        self.server.is_up, self.server.lag = True, 0.0
        self.server.cut_off.clear()
        self.cluster.simulation.heal()
        for node in self.up():
            if node.network.is_stopped:
                self.cluster.simulation.resume(node.network)
        held = max((node.network.held_until - self.now for node in self.up()), default=0.0)
        self.run(max(0.0, held) + (QUIET_S if self.server.deaf else 0.0) + SETTLE_S)
        if not self.up():
            return
        self.end_the_replaced()
        self.run(SETTLE_S)
        self.check()

    def end_the_replaced(self) -> None:
        for node in self.up():
            if not node.engine.view():
                if node not in self.twins:
                    raise self.broken(f"{node.node_id} is out, and nobody had its id: {node.expulsions}")
                self.tally["replaced nodes"] += 1
                self.count(node)
                self.cluster.simulation.kill(node.network)
                next(process for process in self.processes if process.node is node).ended = self.now

    def check(self) -> None:
        there = {(n.node_id, n.engine.boot_epoch, n.network.address) for n in self.up()}
        for node in self.up():
            view = node.engine.view()
            seen = {(member.node_id, member.boot_epoch, member.address) for member in view.alive()}
            if seen != there:
                raise self.broken(f"{node.node_id} at {node.network.address} sees {seen}; there are {there}")
            self.tally["views"] += 1
            entry = self.server.entries.get(node.node_id)
            if entry is None or entry.value != self.seal.close(view[node.node_id]):
                raise self.broken(f"{node.node_id} has no record, or another one: {entry}")
            self.tally["records"] += 1
            self.count(node)

    def count(self, node: SimulatedNode) -> None:
        counters = node.engine.counters()  # type: ignore[attr-defined]  # of every membership
        for effect, name in _EFFECTS.items():
            self.tally[effect] += counters[name]


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Run one schedule."""
    random = Random(seed)
    schedule = Schedule(random, tally)
    schedule.come()
    what, chances = schedule.faults()
    for _ in range(random.randrange(1, 25)):
        if stop():
            break
        random.choices(what, chances)[0]()
        schedule.run(random.choice([0.0, random.uniform(0.0, 4.0), random.uniform(0.0, 20.0)]))
    schedule.settle()
    tally["gaps"] += schedule.server.n_gaps


HUNT = Hunt(
    name="registry",
    promise="nodes find each other by a store's records, whatever befalls it, and nobody else gets in",
    run=run,
    effects=("views", "members taken in", "gaps", "refused starts", "replaced nodes", *_EFFECTS),
    enough=200,
)
