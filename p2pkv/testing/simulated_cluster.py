"""Membership engines of one kind on a simulated network, with a record of all they told their listeners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from random import Random
from typing import Protocol

from p2pkv.directory.membership.base import Identity, Listeners
from p2pkv.directory.membership.timing import Timing
from p2pkv.directory.view import DEFAULT_CLUSTER, State, View
from p2pkv.testing.simulated_network import Engine, SimulatedNetwork, Simulation


class SimulatedEngine(Engine, Protocol):
    """A :class:`~p2pkv.directory.membership.base.Membership` that can be run without its thread."""

    @property
    def boot_epoch(self) -> int:
        """The boot epoch of its node."""

    def view(self) -> View:
        """Return what it believes."""


EngineClass = Callable[..., SimulatedEngine]
"""Made as :class:`~p2pkv.directory.membership.base.Membership` says; of p2pkv or of another package."""


class SimulatedNode:
    """One node: its network, its engine, and what the engine said."""

    def __init__(self, network: SimulatedNetwork, node_id: str) -> None:
        self.network = network
        self.node_id = node_id
        self.engine: SimulatedEngine
        self.changes: list[tuple[View, View]] = []
        self.died: dict[str, float] = {}
        """When this node last took which other off its ring."""
        self.n_resurrections = 0
        self.expulsions: list[str] = []
        self.boots: list[int] = []
        """The boots that it had to take since its start."""

    def state_of(self, node_id: str) -> State | None:
        """Return what this node believes of another, or None if it knows nothing."""
        member = self.engine.view().get(node_id)
        return None if member is None else member.state

    def present(self) -> set[str]:
        """Return the ids on this node's ring."""
        return {member.node_id for member in self.engine.view().present()}

    def changed(self, old: View, new: View) -> None:
        """Record a change; a listener."""
        self.changes.append((old, new))
        for node_id in {member.node_id for member in old.present()}:
            if not new[node_id].is_present:
                self.died[node_id] = self.network.clock.now

    def resurrected(self) -> None:
        """Record a resurrection; a listener."""
        self.n_resurrections += 1


class SimulatedCluster:
    """Starts and harms nodes; every random number comes from ``seed``."""

    def __init__(
        self,
        engine_class: EngineClass,
        seed: int = 1,
        timing: Timing | None = None,
        simulation: Simulation | None = None,
    ) -> None:
        self.simulation = simulation or Simulation()
        self._engine_class = engine_class
        self._timing = timing or Timing(take_back=2.4)  # as long as a death, so that schedules stay short
        self._random = Random(seed)
        self.nodes: dict[str, SimulatedNode] = {}
        """The running ones, by node id."""

    def start(
        self,
        node_id: str,
        address: str,
        *,
        join: Sequence[str] = (),
        last_boot_epoch: int = 0,
        wall_offset_ns: int | None = None,
        cluster: str = DEFAULT_CLUSTER,
    ) -> SimulatedNode:
        """Start a node; raises what its engine raises, and has freed the address then."""
        network = self.simulation.network(address)
        if wall_offset_ns is not None:
            network.clock.wall_offset_ns = wall_offset_ns
        node = SimulatedNode(network, node_id)
        node.engine = self._engine_class(
            network,
            Identity(node_id, {"tcp": "net"}, last_boot_epoch=last_boot_epoch, cluster=cluster),
            join=join,
            listeners=Listeners(node.changed, node.resurrected, node.expulsions.append, node.boots.append),
            clock=network.clock,
            timing=self._timing,
            random=Random(self._random.getrandbits(64)),
        )
        with ExitStack() as undo:
            undo.callback(self.simulation.kill, network)
            self.simulation.enter(network, node.engine)
            undo.pop_all()
        self.nodes[node_id] = node
        return node

    def start_many(self, n_nodes: int) -> list[SimulatedNode]:
        """Start nodes ``n0``... each on its own host, knowing all addresses; wait until they agree."""
        addresses = [f"h{i}:7000" for i in range(n_nodes)]
        nodes = [self.start(f"n{i}", addresses[i], join=addresses) for i in range(n_nodes)]
        self.run(5.0)
        assert self.agree(), [sorted(node.present()) for node in nodes]
        return nodes

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.simulation.run(seconds)

    def kill(self, *nodes: SimulatedNode) -> None:
        """End the processes without a word."""
        for node in nodes:
            self.simulation.kill(node.network)
            self.nodes.pop(node.node_id, None)

    def agree(self) -> bool:
        """Whether all running nodes see exactly each other, alive."""
        ids = set(self.nodes)
        views = [node.engine.view() for node in self.nodes.values()]
        return all({member.node_id for member in view.alive()} == ids for view in views) and (
            len({view.digest for view in views}) <= 1
        )
