"""What it costs all members to hear of a join or a loss: embedded membership, in virtual time and one process.

The engines are p2pkv's own, and so is every byte that they tell each other; the network between them loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from p2pkv.directory.membership.base import Identity
from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.testing.simulated_network import SimulatedNetwork, Simulation
from p2pkv_bench.errors import BenchError
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rows import Row, make_row

_AT_ONCE = 50
"""Members that start before the others hear of them."""
_MEET_S = 60.0
_LOOK_S = 0.1
_AFTER_S = 6.0
"""So long after a change all is said of it: news is news for five seconds."""
_LOSSES = 10
_SEED = 1

Figure = tuple[str, str, list[float]]


def rows(_meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Have as many members as the plan says, each size by itself."""
    for n in plan.members:
        for case, unit, values in _figures(n, plan):
            yield make_row({"p2pkv": values}, suite="news", case=f"{n} members: {case}", unit=unit)


def _figures(n: int, plan: Plan) -> Iterator[Figure]:
    crowd = Crowd()
    for first in range(0, n, _AT_ONCE):
        plan.tell(f"{first} of {n} members have joined")
        for _ in range(min(_AT_ONCE, n - first)):
            crowd.start()
        crowd.run_until_all_agree()
    crowd.run(_AFTER_S)
    plan.tell(f"nothing happens to {n} members")
    before = crowd.counts()
    crowd.run(_AFTER_S)
    idle = crowd.counts().since(before)
    yield "idle: probes that a member sends", "/s", [idle.n_probes / n / _AFTER_S]
    yield "idle: other messages", "/s", [idle.n_told / n / _AFTER_S]
    yield "idle: a member's processor time", "%", [100 * idle.busy_s / n / _AFTER_S]
    for what, change in (
        ("a join", crowd.start),
        ("a leave", lambda: crowd.leave(1)),
        ("a loss", lambda: crowd.lose(1)),
        (f"{_LOSSES} losses at once", lambda: crowd.lose(_LOSSES)),
    ):
        plan.tell(f"{n} members hear of {what}")
        before = crowd.counts()
        change()
        yield f"{what}: all know of it after", "s", [crowd.run_until_all_agree()]
        crowd.run(_AFTER_S)
        spent = crowd.counts().since(before)
        yield f"{what}: messages of a member", "", [spent.n_told / n]
        yield f"{what}: bytes of a member, with answers", "kB", [spent.nbytes / n / 1e3]
        yield f"{what}: bytes of all", "MB", [spent.nbytes / 1e6]


@dataclass(frozen=True, slots=True)
class Counts:
    """What all members, and those that have gone, have sent by now."""

    n_probes: int
    n_told: int
    """Messages that are no probes."""
    nbytes: int
    busy_s: float
    """Processor time of this process."""

    def since(self, before: Counts) -> Counts:
        """Return what has been sent since ``before``."""
        return Counts(
            self.n_probes - before.n_probes,
            self.n_told - before.n_told,
            self.nbytes - before.nbytes,
            self.busy_s - before.busy_s,
        )


class Crowd:
    """All members, and time."""

    def __init__(self) -> None:
        self._simulation = Simulation()
        self._random = Random(_SEED)  # noqa: S311 - nothing secret
        self._networks: list[SimulatedNetwork] = []
        self._engines: dict[str, tuple[SimulatedNetwork, EmbeddedMembership]] = {}

    def start(self) -> None:
        """Have one more member."""
        name = f"node-{len(self._networks)}.example"
        network = self._simulation.network(f"{name}:7400")
        engine = EmbeddedMembership(
            network,
            Identity(name, {"shm": "01234567-89ab-cdef-0123-456789abcdef", "tcp": "net"}),
            join=["node-0.example:7400"],
            clock=network.clock,
            random=Random(self._random.getrandbits(64)),  # noqa: S311 - jitter, nothing secret
        )
        self._simulation.enter(network, engine)
        self._networks.append(network)
        self._engines[name] = network, engine

    def leave(self, n: int) -> None:
        """Have members say good-bye."""
        for name in self._drawn(n):
            network, engine = self._engines.pop(name)
            engine.close()
            self._simulation.kill(network)

    def lose(self, n: int) -> None:
        """End members without a word."""
        for name in self._drawn(n):
            self._simulation.kill(self._engines.pop(name)[0])

    def _drawn(self, n: int) -> list[str]:
        return self._random.sample(list(self._engines)[1:], n)  # who comes next asks for the first one

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self._simulation.run(seconds)

    def run_until_all_agree(self) -> float:
        """Return after how many seconds all know exactly those that live."""
        began = self._simulation.now
        while not self._agree():
            self.run(_LOOK_S)
            if self._simulation.now > began + _MEET_S:
                raise BenchError(f"members do not agree {_MEET_S:g} s after a change")
        return self._simulation.now - began

    def _agree(self) -> bool:
        views = [engine.view() for _, engine in self._engines.values()]
        return len({view.digest for view in views}) == 1 and len(views[0].present()) == len(views)

    def counts(self) -> Counts:
        """Return what was sent so far."""
        n_probes = sum(network.n_probes for network in self._networks)
        return Counts(
            n_probes,
            sum(network.n_sent for network in self._networks) - n_probes,
            sum(network.nbytes_sent + network.nbytes_answered for network in self._networks),
            time.process_time(),
        )
