"""Routers that tell each other of their load over a network that loses, repeats, delays and disorders what they say.

Some stop, die, leave, are started anew, or lie; clocks are apart. Once that is over each must know what the others have
under way, no more and no less. Time and the network are simulated, everything else is the router's own.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv.control.secret import ClusterKeys
from p2pkv.errors import ControlError
from p2pkv.instances.heartbeat import Instance, Role, checked
from p2pkv_proxy.policies import POLICIES
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.replicas import Channel, Replicas
from p2pkv_proxy.routing import RefusedError, Router
from p2pkv_proxy.settings import Settings
from p2pkv_proxy.shared_load import LIFE_S, MOST_REPLICAS, SHARE_S, ReplicaLoad, unpack
from p2pkv_proxy.tracked import Attempt

_KEYS = ClusterKeys(b"", b"")
_CAPACITY = 8
_MOST_KEPT = 256 * 1024
"""Bytes of names that a router keeps of another one, as ``docs/xpyd.md`` says."""
_ROUNDS = 120
_QUIET_S = LIFE_S + 1.5
"""After the last fault: everybody has said all since, and what nobody says any more has expired."""


@dataclass(order=True, slots=True)
class _Flight:
    at: float
    number: int
    to: str = field(compare=False)
    message: bytes = field(compare=False)


class Net:
    """What is on its way, and the one clock that all others are off from."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.is_bad = True
        """Whether messages are lost, repeated and late."""
        self._numbers = itertools.count()
        self._flights: list[_Flight] = []

    def send(self, to: str, message: bytes) -> None:
        copies = self.rng.choices([0, 1, 2], [0.2, 0.7, 0.1])[0] if self.is_bad else 1
        for _ in range(copies):
            delay = self.rng.choice([0.0, 0.01, 0.3]) * self.rng.random() if self.is_bad else 0.001
            heapq.heappush(self._flights, _Flight(self.now + delay, next(self._numbers), to, message))

    def due(self) -> list[_Flight]:
        found = []
        while self._flights and self._flights[0].at <= self.now:
            found.append(heapq.heappop(self._flights))
        return found


class Wire:
    """A channel to an address."""

    is_connected = True

    def __init__(self, sender: Peer, to: str) -> None:
        self._sender = sender
        self._to = to

    def send(self, message: bytes) -> bool:
        if not self._sender.is_dead:
            self._sender.net.send(self._to, message)
        return True

    def close(self) -> None:
        """There is nothing to close."""


class Peer:
    """One router: the real registry, the real choices, and what it has under way."""

    def __init__(self, net: Net, address: str, instances: list[Instance], others: list[str]) -> None:
        self.net = net
        self.address = address
        self.is_stopped = False
        self.is_dead = False
        self._offset = net.rng.uniform(-1e6, 1e6)
        self.registry = Registry(now=self.clock)
        for instance in instances:
            self.registry.list_instance(instance)
            self.registry.note_probe(instance.id, is_healthy=True)
        self.router = Router(
            self.registry, Settings(), POLICIES["least_loaded"](), POLICIES["least_loaded"]()
        )
        connect: Callable[[str], Channel] = lambda to: Wire(self, to)  # noqa: E731 - a type is wanted
        self.replicas = Replicas(
            _KEYS,
            address,
            self.registry.under_way,
            self.registry.note_replicas,
            named=others,
            now=self.clock,
            connect=connect,
        )
        self.registry.replicas = self.replicas
        self.inbox: list[bytes] = []
        self.attempts: list[tuple[str, Attempt]] = []

    def clock(self) -> float:
        """Another one than everybody else's."""
        return self.net.now + self._offset

    def take(self, message: bytes) -> None:
        """Take a message as the router's listener does; a late one must change nothing."""
        try:
            load = unpack(message)
        except ControlError:
            return
        if load is None:
            return
        before = self._known(load.replica)
        self.replicas.note(load)
        if load.replica == self.replicas.told.replica:
            if load.replica in self.replicas.heard.replicas:
                raise Broken(f"{self.address} counts what it has told itself")
            return
        if before is not None and load.sequence <= before[0] and before != self._known(load.replica):
            raise Broken(f"{self.address} took message {load.sequence} behind {before[0]} of one router")

    def _known(self, replica: str) -> tuple[int, dict[str, tuple[int, int]]] | None:
        found = self.replicas.heard.replicas.get(replica)
        return None if found is None else (found.sequence, dict(found.at))

    def request(self) -> None:
        """Have one more request under way, where the router sends it; it has room, so it must find one."""
        prompt = Prompt("", ["x"], None, is_stream=True, max_tokens=1, n_tokens=self.net.rng.randint(1, 5000))
        own = sum(tracked.in_flight for tracked in self.registry)
        if own >= _CAPACITY:
            return
        try:
            chosen = self.router.choose(prompt, "/v1/completions").decode
        except RefusedError as error:
            raise Broken(f"{self.address} has {own} requests and refuses one more: {error}") from error
        self.attempts.append((chosen.id, chosen.begin(prompt.n_tokens, self.clock(), lambda: None)))

    def finish(self) -> None:
        """Have one of the requests end."""
        if self.attempts:
            name, attempt = self.attempts.pop(self.net.rng.randrange(len(self.attempts)))
            tracked = self.registry.get(name)
            assert tracked is not None
            tracked.end(attempt, self.clock())

    def judge_bounds(self) -> None:
        """Demand that what is kept of the others is bounded, and counted right."""
        heard = self.replicas.heard.replicas
        if len(heard) > MOST_REPLICAS:
            raise Broken(f"{self.address} keeps {len(heard)} routers")
        for replica in heard.values():
            nbytes = sum(map(len, replica.named))
            if nbytes > _MOST_KEPT or nbytes != replica.nbytes or set(replica.named) != set(replica.at):
                raise Broken(f"{self.address} keeps {nbytes} bytes of names, counted as {replica.nbytes}")


class Schedule:
    """All of them, and what happens to them."""

    def __init__(self, rng: random.Random, tally: Tally) -> None:
        self._rng = rng
        self._tally = tally
        self.net = Net(rng)
        self.instances = [
            checked(Instance(url=f"http://10.0.0.{n}:1", role=Role.BOTH, id=f"i{n}", capacity=_CAPACITY))
            for n in range(rng.randint(1, 4))
        ]
        self.peers: dict[str, Peer] = {}
        self._ports = itertools.count(1)
        self._said: list[bytes] = []
        for _ in range(rng.randint(2, 5)):
            self._start()

    def _start(self, address: str = "") -> None:
        address = address or f"10.1.0.1:{next(self._ports)}"
        # each is named one other at most; by messages they learn of the rest that has named them
        others = list(self.peers)
        self.peers[address] = Peer(self.net, address, self.instances, others)

    def step(self, *, is_quiet: bool = False) -> None:
        """Let a turn's time pass, with whatever happens meanwhile; ``is_quiet``: requests neither come nor end."""
        self.net.now += SHARE_S * self._rng.uniform(0.5, 1.5)
        for flight in self.net.due():
            self._said = [*self._said[-20:], flight.message]
            peer = self.peers.get(flight.to)
            if peer is not None:
                peer.inbox.append(flight.message)
        for peer in self.peers.values():
            if peer.is_stopped:
                continue
            for message in peer.inbox:
                peer.take(message)
            peer.inbox.clear()
            for act in self._rng.choices(
                [peer.request, peer.finish], k=0 if is_quiet else self._rng.randrange(4)
            ):
                act()
            peer.replicas.turn()
            peer.judge_bounds()

    def disturb(self) -> None:
        """Have something go wrong, now and then."""
        if self._rng.random() < 0.7:
            return
        peer = self._rng.choice(list(self.peers.values()))
        match self._rng.randrange(7):
            case 0 if len(self.peers) > 2:
                self._kill(peer)
                self._tally["died"] += 1
            case 1 if len(self.peers) > 2:
                peer.replicas.close()
                del self.peers[peer.address]
                self._tally["left"] += 1
            case 2:
                self._kill(peer)
                self._start(peer.address)
                self._tally["started anew"] += 1
            case 3:
                peer.is_stopped = not peer.is_stopped
                self._tally["stopped"] += 1
            case 4 if len(self.peers) < 6:
                self._start()
            case 5:
                peer.replicas.found([peer.address, *self.peers])
            case 6:
                self._lie(peer)

    def _kill(self, peer: Peer) -> None:
        """End it without a word."""
        peer.is_dead = True
        peer.replicas.close()
        del self.peers[peer.address]

    def _lie(self, to: Peer) -> None:
        """Say what is not so, or what can't be, as one who has the secret can."""
        self._tally["lies"] += 1
        rng = self._rng
        at = {
            name: (rng.choice([1, 10**6]), rng.choice([0, 10**9]))
            for name in rng.choice(
                [[one.id for one in self.instances], ["x" * 900 + str(n) for n in range(900)]]
            )
        }
        sender = rng.choice(
            [f"liar{rng.randrange(200)}", to.replicas.told.replica, *to.replicas.heard.replicas]
        )
        lie = ReplicaLoad(replica=sender, sequence=rng.choice([0, 1 << 40]), address=to.address, at=at)
        packed = msgspec.msgpack.encode(lie)
        match rng.randrange(4):
            case 0:
                packed = rng.choice(self._said or [b""])
                cut = rng.randrange(len(packed) + 1)
                packed = packed[:cut] + rng.randbytes(rng.randrange(4)) + packed[cut + 1 :]
            case 1:
                wrong = {"i0": (rng.choice([-1, 1 << 62]), 1)}
                packed = msgspec.msgpack.encode(msgspec.structs.replace(lie, at=wrong))
        to.inbox.append(packed)

    def judge(self) -> None:
        """Demand that each knows of all others, and of nobody else, what they have under way."""
        for peer in self.peers.values():
            others = [other for other in self.peers.values() if other is not peer]
            for tracked in peer.registry:
                loads = [other.registry.under_way().get(tracked.id, (0, 0)) for other in others]
                truth = sum(n for n, _ in loads), sum(n for _, n in loads)
                known = tracked.n_requests_replicas, tracked.n_tokens_replicas
                if known != truth:
                    raise Broken(
                        f"{peer.address} takes the others to have {known} requests and tokens at {tracked.id}; "
                        f"they have {truth}"
                    )
                self._tally["loads known"] += truth[0] > 0
            if len(peer.replicas.heard.replicas) != len(others):
                raise Broken(
                    f"{peer.address} knows {len(peer.replicas.heard.replicas)} others of {len(others)}"
                )

    def settle(self) -> None:
        """End all faults, let everybody say all and forget the dead, and let all that is said then arrive."""
        self.net.is_bad = False
        for peer in self.peers.values():
            peer.is_stopped = False
            peer.replicas.found(self.peers)
        # what nobody repeats because it no longer changes is what a lost message leaves wrong
        until = self.net.now + _QUIET_S
        while self.net.now < until:
            self.step(is_quiet=True)


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Run one schedule: faults, quiet, and what everybody knows then; twice."""
    schedule = Schedule(random.Random(seed), tally)
    try:
        for _ in range(2):
            schedule.net.is_bad = True
            for _ in range(_ROUNDS):
                schedule.disturb()
                schedule.step()
            schedule.settle()
            schedule.judge()
            tally["settled"] += 1
            if stop():
                break
        tally["expired"] += sum(peer.replicas.n_expired for peer in schedule.peers.values())
        tally["not taken"] += sum(peer.replicas.refused for peer in schedule.peers.values())
    finally:
        for peer in schedule.peers.values():
            peer.replicas.close()


HUNT = Hunt(
    "router_replicas",
    "once all is quiet each router knows what all others have under way, and none refuses because of what others say",
    run,
    effects=(
        "settled",
        "loads known",
        "died",
        "left",
        "started anew",
        "stopped",
        "lies",
        "expired",
        "not taken",
    ),
    enough=20,
)
