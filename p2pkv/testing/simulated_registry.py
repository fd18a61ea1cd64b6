"""A store of records in one thread, under a virtual clock, and engines that find each other by it.

What the real engine has is used: the follower, the keeper, the seal. Only the service behind them is simulated, and
what may go wrong with it is an attribute or a method of :class:`StoreServer`: it is away, tells late, twice and out of
order, forgets its history, ends streams and leases, and is written by whoever can reach it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from weakref import WeakKeyDictionary

from p2pkv.control.secret import ClusterKeys
from p2pkv.directory.membership.base import Identity, Listeners
from p2pkv.directory.membership.registered import RegisteredMembership
from p2pkv.directory.membership.timing import Timing
from p2pkv.directory.registry.follower import Follower
from p2pkv.directory.registry.following import counts
from p2pkv.directory.registry.keeper import Keeper
from p2pkv.directory.registry.seal import Seal
from p2pkv.directory.registry.store import (
    Change,
    Contents,
    Entry,
    GapError,
    Listing,
    Outranks,
    Registry,
    Store,
)
from p2pkv.errors import RegistryError
from p2pkv.testing.simulated_network import SimulatedClock, SimulatedNetwork, Simulation

TTL = 30.0
_TURNS = 3
"""Steps of a thread that the real one would take without a pause: to list, to follow, to write again."""


@dataclass(slots=True)
class _Lease:
    ends_at: float


@dataclass(frozen=True, slots=True)
class _Logged:
    change: Change
    at: float


class StoreServer:
    """What all nodes of a simulation share: entries, their history, and leases."""

    def __init__(self) -> None:
        self.is_up = True
        self.lag = 0.0
        """Seconds until a change is told to those who follow."""
        self.noise: Random | None = None
        """Where there is one, it draws what comes twice, and out of order."""
        self.cut_off: set[str] = set()
        """Names of the nodes that can't reach the store."""
        self.deaf: set[str] = set()
        """Names of the nodes that a server which hangs tells nothing any more, until they list again."""
        self.n_gaps = 0
        """How often one who followed was behind what is remembered."""
        self.version = 0
        self.entries: dict[str, Entry] = {}
        self.seen: list[tuple[str, bytes]] = []
        """Every record that was ever written, by name; a stranger may put one back."""
        self._leases: dict[str, _Lease] = {}
        self._history: list[_Logged] = []
        self._compacted = 0
        self._watches: list[SimulatedStore] = []

    def write(self, name: str, value: bytes | None, now: float) -> int:
        """Write an entry, or delete it, whoever's it is; one written so has no lease."""
        self.version += 1
        self._leases.pop(name, None)
        if value is None:
            self.entries.pop(name, None)
        else:
            self.entries[name] = Entry(value, self.version)
            self.seen.append((name, value))
        self._history.append(_Logged(Change(name, value, self.version), now))
        return self.version

    def compact(self) -> None:
        """Forget all history: whoever is behind has to list."""
        self._compacted, self._history = self.version, []

    def break_watches(self) -> None:
        """End every stream; what comes until the next list is told to nobody."""
        for store in self._watches:
            store.is_broken = True

    def drop_lease(self, name: str, now: float) -> None:
        """End an entry's lease before its time."""
        if name in self._leases:
            self.write(name, None, now)

    def expire(self, now: float) -> None:
        """Remove the entries whose lease has ended; while the store is down no lease ends."""
        for name, lease in list(self._leases.items()):
            if not self.is_up:
                lease.ends_at = max(lease.ends_at, now + TTL)
            elif lease.ends_at <= now:
                self.write(name, None, now)

    def changes_after(self, since: int, now: float) -> list[Change]:
        """Return what happened since, as far as it is told already."""
        if since < self._compacted:
            self.n_gaps += 1
            raise GapError(f"the store has forgotten what came before {self._compacted}")
        # In order, as real stores do: a node that enters is ahead of others in time, and what it has written waits.
        told = takewhile(lambda logged: logged.at + self.lag <= now, self._history)
        return [logged.change for logged in told if logged.change.version > since]

    def lease(self, name: str, now: float) -> None:
        """Let an entry end unless it is renewed."""
        self._leases[name] = _Lease(now + TTL)

    def is_leased(self, name: str) -> bool:
        """Whether an entry is there whose node can renew it."""
        return name in self._leases

    def followed_by(self, store: SimulatedStore) -> None:
        """Count a store among those that watch."""
        self._watches.append(store)


class SimulatedStore(Store):
    """One node's way to the server."""

    def __init__(self, server: StoreServer, node_id: str, clock: SimulatedClock) -> None:
        self._server = server
        self._node_id = node_id
        self._clock = clock
        self._since = self._own = 0
        self._last: list[Change] = []
        self.is_broken = False
        server.followed_by(self)

    @property
    def server(self) -> str:
        return "the simulated store"

    def read_all(self, timeout: float) -> Contents:
        self._reach()
        return Contents(dict(self._server.entries), self._server.version)

    def watch(self, since: int, timeout: float) -> None:
        self._reach()
        self._since, self.is_broken = since, False
        self._server.deaf.discard(self._node_id)

    def changes(self, timeout: float) -> list[Change] | None:
        self._reach()
        if self.is_broken:
            raise RegistryError("the stream has ended")
        if self._node_id in self._server.deaf:
            return None
        told = self._server.changes_after(self._since, self._clock.now)
        self._since = max([self._since, *(change.version for change in told)])
        noise, before, self._last = self._server.noise, self._last, told or self._last
        if noise is not None and told:
            told = [*told, *before]
            noise.shuffle(told)
        return told or None

    def put(self, name: str, value: bytes, expected: int, timeout: float) -> Entry | int:
        self._reach()
        there = self._server.entries.get(name)
        if (there.version if there else 0) != expected:
            return there if there is not None else Entry(value, 0)
        version = self._server.write(name, value, self._clock.now)
        self._server.lease(name, self._clock.now)
        self._own = version
        return version

    def renew(self, name: str, version: int, timeout: float) -> int | None:
        self._reach()
        there = self._server.entries.get(name)
        if there is None or there.version != version or not self._server.is_leased(name):
            return None
        self._server.lease(name, self._clock.now)
        return version

    def remove(self, name: str, timeout: float) -> None:
        self._reach()
        there = self._server.entries.get(name)
        if there is not None and there.version == self._own:
            self._server.write(name, None, self._clock.now)

    def leave_server(self) -> None:
        """Do nothing: there is one."""

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _reach(self) -> None:
        self._server.expire(self._clock.now)
        if not self._server.is_up or self._node_id in self._server.cut_off:
            raise RegistryError("the store does not answer")


class SimulatedRegistry(Registry):
    """What :class:`~p2pkv.directory.registry.following.FollowingRegistry` is, without its threads."""

    def __init__(self, server: StoreServer, network: SimulatedNetwork, node_id: str, random: Random) -> None:
        self._server = server
        self._clock = network.clock
        stores = [SimulatedStore(server, node_id, network.clock) for _ in range(2)]
        self._follower = Follower(stores[0], self.where, network.clock.monotonic, random, lambda: None)
        self._keeper = Keeper(stores[1], self.where, TTL, network.clock.monotonic, random)
        self._due = [network.clock.now, math.inf]
        self._is_open = False

    @property
    def where(self) -> str:
        return "the simulated store"

    def open(self, name: str, outranks: Outranks, on_change: Callable[[], None], deadline_s: float) -> None:
        self._is_open = True
        self._keeper.open(name, outranks)
        self._follower.read_all(deadline_s)

    def listing(self) -> Listing:
        if self._is_open:
            self._turn(0, lambda: self._follower.step(0.0))
            self._turn(1, self._keeper.step)
        return self._follower.listing

    def claim(self, value: bytes, over: Collection[bytes], deadline_s: float) -> bytes | None:
        in_the_way = self._keeper.claim(value, over, self._clock.now + deadline_s)
        if in_the_way is None:
            self.publish(value)
        return in_the_way

    def publish(self, value: bytes | None) -> None:
        self._keeper.wanted = value
        self._due[1] = self._clock.now

    def counters(self) -> dict[str, int]:
        return counts(self._follower, self._keeper)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                self._keeper.leave(0.4)
            except RegistryError:
                return  # its lease ends

    def _turn(self, which: int, step: Callable[[], float]) -> None:
        for _ in range(_TURNS):
            if self._due[which] > self._clock.now:
                break
            self._due[which] = self._clock.now + step()


_servers: WeakKeyDictionary[Simulation, StoreServer] = WeakKeyDictionary()


def server_of(simulation: Simulation) -> StoreServer:
    """Return the store that all nodes of a simulation have."""
    return _servers.setdefault(simulation, StoreServer())


def simulation_seal(cluster: str) -> Seal:
    """Return the seal of those who have the simulation's secret."""
    return Seal(ClusterKeys(public=b"", private=b"the secret of the simulation"), cluster)


class SimulatedRegisteredMembership(RegisteredMembership):
    """The engine over the simulated store. It is told no join addresses: what is found is found by the registry."""

    def __init__(
        self,
        network: SimulatedNetwork,
        identity: Identity,
        *,
        join: Sequence[str] = (),
        listeners: Listeners | None = None,
        clock: SimulatedClock | None = None,
        timing: Timing | None = None,
        random: Random | None = None,
    ) -> None:
        drawn = Random((random or Random(1)).getrandbits(64))
        super().__init__(
            network,
            identity,
            registry=SimulatedRegistry(server_of(network.simulation), network, identity.node_id, drawn),
            seal=simulation_seal(identity.cluster),
            listeners=listeners,
            clock=clock,
            timing=timing,
            random=random,
        )
