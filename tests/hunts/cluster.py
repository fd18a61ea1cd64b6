"""Membership and directory of a few whole nodes, in simulated time, under everything that can befall them.

The oracle is asked some seconds after the last fault has ended: every page that lies in a living node's pool is found
by every living node; nothing of a dead boot is; all agree on who lives, no two live under one id, and nobody is
expelled but for a successor, and for as long as that lives; and once all that is done, nothing more is told to anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv.directory.view import State, node_key
from p2pkv.errors import DuplicateNodeError
from p2pkv.page import Keys
from p2pkv.testing.simulated_network import LATENCY
from simulated_world import EFFECTS, MOST_PAGES, World, WorldNode

SETTLE_S = 16.0
"""From the end of the last fault to the judgement: a death, its news, what moved, an owed entry's retries."""
_MOST_NODES = 6
_HOUR_S = 3600.0
_MOST_LATE_S = 1.0
"""Later than that, members may be given up before anybody notices that all are late."""


@dataclass
class Schedule:
    """One cluster and its history."""

    random: Random
    tally: Tally
    world: World = field(init=False)
    join: list[str] = field(init=False)
    story: list[str] = field(default_factory=list)
    hot: Keys = field(init=False)
    twins: set[WorldNode] = field(default_factory=set)
    """Processes that lived while another had their id: one of them has to go."""
    n_started: int = 0

    def __post_init__(self) -> None:
        self.world = World(self.random)
        one_address = self.random.random() < 0.3
        self.join = [f"h{i}:7000" for i in range(1 if one_address else _MOST_NODES)]
        self.hot = self.keys(8)

    # what a schedule is made of

    def note(self, what: str) -> None:
        """Remember a step for whoever replays this."""
        self.story.append(f"{self.world.now:6.1f} s: {what}")

    def keys(self, n: int) -> Keys:
        """Draw keys."""
        return np.frombuffer(self.random.randbytes(16 * n), np.uint8).reshape(n, 16).copy()

    def up(self) -> list[WorldNode]:
        """Return the nodes that run Python now."""
        return [node for node in self.world.nodes if node.is_running and not node.expelled]

    def some(self, nodes: list[WorldNode]) -> WorldNode | None:
        """Draw a node."""
        return self.random.choice(nodes) if nodes else None

    def start(self, index: int, *, host: int | None = None, off_s: float = 0.0) -> None:
        """Start node ``index``, on its own host if no other is named."""
        self.n_started += 1
        address = f"h{index if host is None else host}:{7000 + self.n_started}"
        try:
            node = self.world.start(f"n{index}", address, join=self.join, off_s=off_s)
        except DuplicateNodeError:
            self.note(f"n{index} at {address} is refused")
            return
        same = [other for other in self.world.nodes if other.node_id == node.node_id]
        self.twins.update(same if len(same) > 1 else ())
        boot = node.engine.boot_epoch
        self.note(f"n{index} starts at {address}, its clock {off_s:+.0f} s, boot {boot}")

    def kill(self) -> None:
        node = self.some(self.world.nodes)
        if node is not None and len(self.world.nodes) > 2:
            self.note(f"{node.node_id} is killed")
            self.world.end(node, says_so=False)

    def leave(self) -> None:
        node = self.some(self.up())
        if node is not None and len(self.world.nodes) > 2:
            self.note(f"{node.node_id} leaves")
            self.world.end(node, says_so=True)

    def come(self) -> None:
        """Start a node that is not there, perhaps one that was, perhaps by a clock that is off."""
        ids = {node.node_id for node in self.world.nodes}
        absent = [i for i in range(_MOST_NODES) if f"n{i}" not in ids]
        if absent:
            off_s = self.random.choice([0.0, 0.0, -_HOUR_S, _HOUR_S, -5.0])
            self.start(self.random.choice(absent), off_s=off_s)

    def restart(self) -> None:
        """Kill a node and start it again at once."""
        node = self.some(self.world.nodes)
        if node is not None:
            index = int(node.node_id[1:])
            self.note(f"{node.node_id} is killed and started again")
            self.world.end(node, says_so=False)
            self.start(index, off_s=self.random.choice([0.0, 0.0, -_HOUR_S, _HOUR_S]))

    def replace(self) -> None:
        """Stop a process, and start its node elsewhere, as a scheduler does with a host that it has lost."""
        node = self.some(self.up())
        if node is None:
            return
        index = int(node.node_id[1:])
        self.note(f"{node.node_id} is stopped, to be started elsewhere")
        self.world.simulation.stop(node.network)
        self.world.run(self.random.uniform(0.0, 4.0))
        self.start(index, host=9)

    def stop(self) -> None:
        node = self.some(self.up())
        if node is not None:
            self.note(f"{node.node_id} is stopped")
            self.world.simulation.stop(node.network)

    def go_on(self) -> None:
        node = self.some([node for node in self.world.nodes if node.network.is_stopped])
        if node is not None:
            self.note(f"{node.node_id} goes on")
            self.world.simulation.resume(node.network)

    def hold(self) -> None:
        node = self.some(self.up())
        if node is not None:
            seconds = self.random.choice([2.0, 12.0, 25.0])
            self.note(f"{node.node_id}'s interpreter is held for {seconds:.0f} s")
            self.world.simulation.hold_interpreter(node.network, seconds)

    def oversleep(self) -> None:
        node = self.some(self.up())
        if node is not None:
            self.note(f"{node.node_id} sleeps in its probes")
            node.network.late_probes = [self.random.uniform(0.5, 3.0)]

    def be_late(self) -> None:
        """Have a node, or all of them, answer late for a while."""
        node = self.some(self.up())
        if node is not None:
            seconds = self.random.uniform(0.1, _MOST_LATE_S)
            late = self.world.nodes if self.random.random() < 0.5 else [node]
            self.note(f"{', '.join(n.node_id for n in late)} answer in {seconds:.1f} s")
            for node in late:
                node.network.answers_in = seconds

    def be_quick(self) -> None:
        self.note("all answer at once")
        for node in self.world.nodes:
            node.network.answers_in = LATENCY

    def cut(self) -> None:
        """Break the link of two nodes, one way or both."""
        if len(self.world.nodes) < 2:
            return
        a, b = self.random.sample(self.world.nodes, 2)
        ways = self.random.choice(["one way", "both ways"])
        self.note(f"what {a.node_id} sends to {b.node_id} is lost, {ways}")
        self.world.simulation.cut(a.network, b.network)
        if ways == "both ways":
            self.world.simulation.cut(b.network, a.network)

    def part(self) -> None:
        networks = [node.network for node in self.world.nodes]
        self.random.shuffle(networks)
        at = self.random.randrange(len(networks) + 1)
        self.note(f"the network is parted: {[n.address for n in networks[:at]]} from the others")
        self.world.simulation.partition(networks[:at], networks[at:])

    def heal(self) -> None:
        self.note("the network heals")
        self.world.simulation.heal()

    def starve(self) -> None:
        node = self.some(self.up())
        if node is not None:
            node.control.is_starved = not node.control.is_starved
            self.note(f"{node.node_id} has {'no' if node.control.is_starved else 'its'} descriptors")

    def turn_clock(self) -> None:
        node = self.some(self.up())
        if node is not None:
            seconds = self.random.choice([-_HOUR_S, -10.0, 10.0, _HOUR_S])
            self.note(f"{node.node_id}'s clock jumps {seconds:+.0f} s")
            node.network.clock.wall_offset_ns += int(seconds * 1e9)
            node.clock.wall_offset_ns += int(seconds * 1e9)

    def publish(self) -> None:
        node = self.some(self.up())
        if node is not None:
            keys = self.keys(self.random.randrange(1, 12))
            if self.random.random() < 0.3:
                keys = self.hot[: self.random.randrange(1, len(self.hot) + 1)]
            self.note(f"{node.node_id} publishes {len(keys)} pages, {node.publish(keys)} of them are told")

    def retract(self) -> None:
        node = self.some(self.up())
        if node is not None and len(pages := node.pages()):
            n = self.random.randrange(1, len(pages) + 1)
            self.note(f"{node.node_id} takes {n} pages back")
            node.retract(pages[self.random.sample(range(len(pages)), n)])

    def faults(self) -> tuple[list[Callable[[], None]], list[int]]:
        """Return what may happen, and how likely each is."""
        chances = {
            self.publish: 12,
            self.retract: 3,
            self.kill: 3,
            self.leave: 2,
            self.come: 4,
            self.restart: 3,
            self.replace: 1,
            self.stop: 2,
            self.go_on: 2,
            self.hold: 3,
            self.oversleep: 1,
            self.be_late: 1,
            self.be_quick: 1,
            self.cut: 3,
            self.part: 1,
            self.heal: 2,
            self.starve: 2,
            self.turn_clock: 2,
        }
        return list(chances), list(chances.values())

    # the oracle

    def broken(self, what: str) -> Broken:
        """Return what was broken, with the story that led there."""
        return Broken("\n".join([what, *self.story]))

    def settle(self) -> None:
        """End every fault, and let those end that were replaced."""
        self.note("all faults end")
        self.world.calm()
        self.world.run(5.0)  # who was expelled knows it by now
        alive = [node for node in self.world.nodes if not node.expelled]
        hosts = {node.address.partition(":")[0] for node in alive}
        if not any(address.partition(":")[0] in hosts for address in self.join):
            self.start(_MOST_NODES, host=0)  # or those who know nothing but these addresses meet nobody
        self.world.run(SETTLE_S)
        for node in self.world.nodes:
            if node.was_expelled and node not in self.twins:
                raise self.broken(
                    f"{node.node_id} was expelled, and nobody had its place: {node.was_expelled}"
                )
        for node in [node for node in self.world.nodes if node.expelled]:
            if not any(other.node_id == node.node_id and not other.expelled for other in self.world.nodes):
                raise self.broken(f"{node.node_id} stays out, and nobody has its place: {node.expelled}")
            self.tally["replaced nodes"] += 1
            self.world.end(node, says_so=False)

    def break_links(self) -> None:
        """Break links of one node or of two, and nothing else: others notice nothing, and nobody is given up."""
        nodes = self.world.nodes
        while len(nodes) < 4:
            self.come()
        for node in nodes:
            self.note(f"{node.node_id} publishes, {node.publish(self.keys(4))} of 4 pages are told")
        self.world.run(SETTLE_S)
        a, b = self.random.sample(nodes, 2)
        self.note(f"the link of {a.node_id} and {b.node_id} breaks, and nothing else")
        self.world.simulation.cut(a.network, b.network)
        if self.random.random() < 0.7:
            self.world.simulation.cut(b.network, a.network)
        others = [(node, node.n_changes, node.control.n_entries_put) for node in nodes if node not in (a, b)]
        self.world.run(self.random.uniform(5.0, 12.0))
        ids = {node.node_id for node in nodes}
        for node in nodes:
            if {member.node_id for member in node.engine.view().present()} != ids:
                raise self.broken(f"{node.node_id} gives up a node that others reach: {node.engine.view()}")
        for node, n_changes, n_put in others:
            if node.n_changes != n_changes:
                raise self.broken(f"{node.node_id}'s view changes for a link that is not its own")
            if node.control.n_entries_put != n_put:
                raise self.broken(f"{node.node_id} puts entries again for a link that is not its own")
            self.tally["bystanders"] += 1

    def check_members(self) -> None:
        """Everybody sees exactly those who are there."""
        nodes = self.world.nodes
        there = {node.node_id: (node.address, node.engine.boot_epoch) for node in nodes}
        if len(there) != len(nodes):
            raise self.broken(f"two nodes live under one id: {[node.address for node in nodes]}")
        for node in nodes:
            view = node.engine.view()
            seen = {member.node_id: (member.address, member.boot_epoch) for member in view.alive()}
            if seen != there or any(member.state is State.SUSPECT for member in view.values()):
                raise self.broken(f"{node.node_id} sees {view}, {seen}; there are {there}")
            self.tally["views"] += 1

    def check_pages(self) -> None:
        """Every page of a pool is found from everywhere, and nothing else that counts."""
        nodes = self.world.nodes
        boots = {node_key(node.node_id): node.engine.boot_epoch for node in nodes}
        held = {node.node_id: {key.tobytes() for key in node.pages()} for node in nodes}
        everything = np.array(
            [np.frombuffer(key, np.uint8) for key in sorted(set().union(*held.values()))], np.uint8
        ).reshape(-1, 16)
        if not len(everything):
            return
        for node in nodes:
            found, locations = node.look_up(everything)
            for key, is_found, location in zip(everything, found, locations, strict=True):
                holders = [holder for holder, keys in held.items() if key.tobytes() in keys]
                if not is_found:
                    raise self.broken(
                        f"{node.node_id} does not find {key.tobytes().hex()}, which {holders} hold"
                    )
                if boots.get(int(location["owner"])) != int(location["boot"]):
                    raise self.broken(f"{node.node_id} finds {key.tobytes().hex()} in a boot that is over")
                self.tally["pages found"] += 1

    def check_calm(self) -> None:
        """What is settled costs nothing more but probes."""
        before = [
            (node, node.n_changes, node.control.n_entries_put, node.network.nbytes_sent)
            for node in self.world.nodes
        ]
        self.world.run(3.0)
        for node, n_changes, n_put, nbytes in before:
            if node.n_changes != n_changes:
                raise self.broken(f"{node.node_id}'s view changes in a settled cluster")
            if node.control.n_entries_put - n_put > MOST_PAGES:
                raise self.broken(
                    f"{node.node_id} puts {node.control.n_entries_put - n_put} entries in a settled cluster"
                )
            if node.network.nbytes_sent - nbytes > 0:
                raise self.broken(f"{node.node_id} goes on telling views in a settled cluster")
        self.tally["calm clusters"] += 1


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Run one schedule."""
    random = Random(seed)
    schedule = Schedule(random, tally)
    try:
        for index in range(random.randrange(2, _MOST_NODES)):
            schedule.start(index)
        schedule.world.run(3.0)
        steps, chances = schedule.faults()
        if random.random() < 0.15:
            schedule.break_links()
        for _ in range(random.randrange(4, 20)):
            if stop():
                break
            random.choices(steps, chances)[0]()
            schedule.world.run(random.choice([0.0, 0.1, 0.5, 2.0, 5.0]))
            tally["steps"] += 1
        schedule.settle()
        schedule.check_members()
        schedule.check_pages()
        schedule.check_calm()
    finally:
        tally.update(schedule.world.counted())
        schedule.world.close()


HUNT = Hunt(
    name="cluster",
    promise="the living agree on who lives, and find every living page",
    run=run,
    effects=("pages found", "replaced nodes", "bystanders", *EFFECTS),
    enough=200,
)
