"""A network in one thread, under a virtual clock: membership engines run on it as fast as they compute.

Each node has a clock of its own. The simulation always runs the node whose turn comes first; a call that
would block moves that node's clock alone. So hours pass in moments, and a run with the same seeds is the
same run. ::

    simulation = Simulation()
    node = simulation.network("host1:7000")
    engine = EmbeddedMembership(node, Identity("n1"), clock=node.clock, random=Random(1))
    simulation.enter(node, engine)
    simulation.run(10.0)

What may go wrong is a method: :meth:`Simulation.kill`, :meth:`~Simulation.stop`, :meth:`~Simulation.resume`,
:meth:`~Simulation.hold_interpreter`, :meth:`~Simulation.partition`, :meth:`~Simulation.cut` and
:meth:`~Simulation.heal`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from p2pkv.directory.membership.base import Late, ProbeReply

LATENCY = 0.001
"""Seconds that an answered call takes, where nobody is late."""
PATIENCE_S = 4.0
"""How long the answers to probes and exchanges that have ended are waited for."""


class Engine(Protocol):
    """What the simulation runs: a membership engine without its thread."""

    def enter(self, deadline_s: float) -> None:
        """Become a member."""

    def step(self, blobs: Sequence[bytes]) -> float:
        """Do what is due; return the seconds until the next step."""


class SimulatedClock:
    """The clock of one simulated node; satisfies :class:`~p2pkv.directory.membership.timing.Clock`."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.wall_offset_ns = 1_700_000_000_000_000_000
        self.busy_s = 0.0

    def monotonic(self) -> float:
        """Return the node's virtual time in seconds."""
        return self.now

    def busy(self) -> float:
        """Return what the node has computed; set ``busy_s`` for one that computes much."""
        return self.busy_s

    def wall_ns(self) -> int:
        """Return the node's virtual time since 1970; set ``wall_offset_ns`` for a clock that is off."""
        return self.wall_offset_ns + round(self.now * 1e9)


class SimulatedNetwork:
    """One node's network; satisfies :class:`~p2pkv.directory.membership.base.Network`.

    As the real one it answers probes and exchanges even while the node's interpreter is held.
    """

    def __init__(self, simulation: Simulation, address: str, now: float) -> None:
        self.simulation = simulation
        self._address = address
        self.clock = SimulatedClock(now)
        self.engine: Engine | None = None
        self.is_stopped = False
        self.wakes_at = math.inf
        self.held_until = -math.inf
        self.answers_in = LATENCY
        """How many seconds this node takes to answer. What comes too late for a call is among :meth:`late`."""
        self.late_probes: list[float] = []
        """Each of the next probes takes this many seconds, and its replies are found too late."""
        self.n_sent = 0
        """Messages, probes included."""
        self.n_probes = 0
        self.nbytes_sent = 0
        """Of views and news."""
        self.nbytes_answered = 0
        """Of the views that this node has answered exchanges with."""
        self._identity: tuple[int, int] | None = None
        self._blob = b""
        self._digest = 0
        self._inbox: list[bytes] = []
        self._coming: list[tuple[float, Late]] = []

    @property
    def address(self) -> str:
        """Where this node was made to listen."""
        return self._address

    def announce(self, node_key: int, boot_epoch: int) -> None:
        """Answer from now on."""
        self._identity = (node_key, boot_epoch)

    def withdraw(self) -> None:
        """Answer no more."""
        self._identity = None

    def set_view(self, blob: bytes, digest: int) -> None:
        """Answer with this view."""
        self._blob, self._digest = blob, digest

    def probe(
        self, addresses: Sequence[str], timeout: float, meanwhile: Callable[[], None] | None = None
    ) -> list[ProbeReply | None]:
        """Probe all; takes ``timeout`` of virtual time if one is silent, and others run before or after it."""
        if self.late_probes:
            self.clock.now += self.late_probes.pop(0)
            return [None] * len(addresses)
        self.n_probes += len(addresses)
        peers = self._answering(addresses, timeout, late=self._late_reply)
        return [None if peer is None else peer.reply() for peer in peers]

    def exchange(self, addresses: Sequence[str], blob: bytes, timeout: float) -> list[bytes | None]:
        """Exchange views with all; takes ``timeout`` of virtual time if one is silent."""
        blobs = [blob] * len(addresses)
        peers = self._answering(addresses, timeout, blobs, late=self._late_view)
        for peer in peers:
            if peer is not None:
                peer.nbytes_answered += len(peer._blob)
        return [None if peer is None else peer._blob for peer in peers]

    def tell(self, messages: Sequence[tuple[str, bytes]], timeout: float) -> list[ProbeReply | None]:
        """Hand messages over; takes ``timeout`` of virtual time if one addressee is silent."""
        addresses, blobs = zip(*messages, strict=True)
        peers = self._answering(addresses, timeout, blobs)
        return [None if peer is None else peer.reply() for peer in peers]

    def late(self, stretch: float) -> list[Late]:
        """Return the answers that have come since."""
        now = self.clock.now
        here = [answer for at, answer in self._coming if at <= now]
        self._coming = [
            (at, answer)
            for at, answer in self._coming
            if at > now and answer.asked_at + PATIENCE_S * stretch >= now
        ]
        return here

    def received(self, timeout: float) -> list[bytes]:
        """Return what was handed over; never blocks, since the simulation wakes the node."""
        inbox, self._inbox = self._inbox, []
        return inbox

    def resolve(self, address: str) -> Sequence[str]:
        """Return what :attr:`Simulation.names` has for the host, or the address itself."""
        host, _, port = address.rpartition(":")
        return [f"{found}:{port}" for found in self.simulation.names.get(host, [host])]

    def listen_also(self, address: str) -> bool:
        """Take the address if it is on this node's host and free."""
        return self.simulation.bind(self, address)

    def listen_no_more(self) -> None:
        """Have the own address only."""
        self.simulation.unbind(self)

    def why_silent(self, address: str, tell: Callable[[str], None]) -> None:
        """Say that nobody is there."""
        tell("nobody is there")

    def wake(self) -> None:
        """Do nothing: nothing blocks here."""

    def reply(self) -> ProbeReply:
        """Return what this node answers to a probe."""
        assert self._identity is not None, "a node that has not announced itself answers nothing"
        return ProbeReply(*self._identity, self._digest)

    def deliver(self, blob: bytes, at: float) -> None:
        """Queue a view for this node's engine and wake it."""
        self._inbox.append(blob)
        self.wakes_at = min(self.wakes_at, max(at, self.clock.now, self.held_until))

    @property
    def announced_digest(self) -> int:
        """The digest that probes are answered with."""
        return self._digest

    @property
    def is_announced(self) -> bool:
        """Whether this node answers at all."""
        return self._identity is not None

    def _late_reply(self, address: str, peer: SimulatedNetwork) -> Late:
        return Late(address, self.clock.now, reply=peer.reply())

    def _late_view(self, address: str, peer: SimulatedNetwork) -> Late:
        return Late(address, self.clock.now, view=peer._blob)

    def _answering(
        self,
        addresses: Sequence[str],
        timeout: float,
        blobs: Sequence[bytes] = (),
        *,
        late: Callable[[str, SimulatedNetwork], Late] | None = None,
    ) -> list[SimulatedNetwork | None]:
        """Return who answers in time, once that time has passed; ``blobs`` reach whoever hears us.

        What comes after its time is what the peer would have answered at once: it may have died since.
        """
        self.n_sent += len(addresses)
        peers: list[SimulatedNetwork | None] = []
        took = LATENCY
        for index, address in enumerate(addresses):
            peer = self.simulation.hearing(self, address)
            if peer is not None and blobs:
                self.nbytes_sent += len(blobs[index])
                peer.deliver(blobs[index], self.clock.now)
            delay = math.inf
            if peer is not None and self.simulation.is_open(peer, self):
                delay = self.simulation.delay(self, peer)
                if delay > timeout and late is not None:
                    self._coming.append((self.clock.now + delay, late(address, peer)))
            peers.append(peer if delay <= timeout else None)
            took = max(took, min(delay, timeout))
        self.clock.now += took
        return peers


class Simulation:
    """All the nodes, and what is wrong with them."""

    def __init__(self) -> None:
        self.now = 0.0
        self._nodes: list[SimulatedNetwork] = []
        self._bound: dict[str, SimulatedNetwork] = {}
        self.names: dict[str, list[str]] = {}
        """Names that stand for hosts."""
        self._groups: list[set[SimulatedNetwork]] = []
        self._cuts: set[tuple[SimulatedNetwork, SimulatedNetwork]] = set()

    def network(self, address: str) -> SimulatedNetwork:
        """Return the network of a new node that listens on ``address``."""
        node = SimulatedNetwork(self, address, self.now)
        assert self.bind(node, address), f"{address} is taken"
        self._nodes.append(node)
        return node

    def enter(self, node: SimulatedNetwork, engine: Engine) -> None:
        """Make the engine a member; it takes part in every :meth:`run` from then on."""
        engine.enter(5.0)
        node.engine = engine
        node.wakes_at = node.clock.now

    def run(self, seconds: float) -> None:
        """Let ``seconds`` pass for every node."""
        end = self.now + seconds
        while True:
            node = min(
                (n for n in self._nodes if n.engine is not None), key=lambda n: n.wakes_at, default=None
            )
            if node is None or node.wakes_at > end:
                break
            assert node.engine is not None
            node.clock.now = max(node.clock.now, node.wakes_at)
            node.wakes_at = math.inf
            wait = node.engine.step(node.received(0.0))
            node.wakes_at = min(node.wakes_at, max(node.clock.now + wait, node.held_until))
        self.now = end

    def kill(self, node: SimulatedNetwork) -> None:
        """End the process, as kill -9 does: its addresses are free, its peers get no word."""
        self._nodes.remove(node)
        self._bound = {address: holder for address, holder in self._bound.items() if holder is not node}

    def stop(self, node: SimulatedNetwork) -> None:
        """Stop the process, as SIGSTOP does: its addresses stay taken, and it answers nothing."""
        node.is_stopped = True
        node.held_until = math.inf
        node.wakes_at = math.inf

    def resume(self, node: SimulatedNetwork) -> None:
        """Let a stopped process go on, as SIGCONT does."""
        node.is_stopped = False
        node.held_until = -math.inf
        node.wakes_at = max(self.now, node.clock.now)

    def hold_interpreter(self, node: SimulatedNetwork, seconds: float) -> None:
        """Keep the node from running Python; it goes on answering."""
        node.held_until = self.now + seconds
        node.wakes_at = max(node.wakes_at, node.held_until)

    def partition(self, *groups: Sequence[SimulatedNetwork]) -> None:
        """Let nodes reach only those of their own group; a node in no group reaches nobody."""
        self._groups = [set(group) for group in groups]

    def cut(self, sender: SimulatedNetwork, receiver: SimulatedNetwork) -> None:
        """Lose whatever one node sends to the other, requests and answers; not what comes the other way."""
        self._cuts.add((sender, receiver))

    def heal(self) -> None:
        """Let everybody reach everybody."""
        self._groups = []
        self._cuts.clear()

    def bind(self, node: SimulatedNetwork, address: str) -> bool:
        """Give the address to the node if it is on its host and free."""
        if address in self._bound or address.rpartition(":")[0] != node.address.rpartition(":")[0]:
            return False
        self._bound[address] = node
        return True

    def unbind(self, node: SimulatedNetwork) -> None:
        """Free all addresses of a node but its own."""
        self._bound = {
            address: holder
            for address, holder in self._bound.items()
            if holder is not node or address == node.address
        }

    def delay(self, asker: SimulatedNetwork, peer: SimulatedNetwork) -> float:
        """Return how many seconds an answer takes that is asked for now."""
        return peer.answers_in

    def holder(self, address: str) -> SimulatedNetwork | None:
        """Return the node that has the address, or None if it is free."""
        return self._bound.get(address)

    def hearing(self, asker: SimulatedNetwork, address: str) -> SimulatedNetwork | None:
        """Return the node that takes what ``asker`` sends to the address, or None."""
        holder = self._bound.get(address)
        if holder is None or holder.is_stopped or not holder.is_announced:
            return None
        return holder if self.is_open(asker, holder) else None

    def is_open(self, sender: SimulatedNetwork, receiver: SimulatedNetwork) -> bool:
        """Whether what one node sends reaches the other."""
        if sender is receiver:
            return True
        if self._groups and not any(sender in group and receiver in group for group in self._groups):
            return False
        return (sender, receiver) not in self._cuts
