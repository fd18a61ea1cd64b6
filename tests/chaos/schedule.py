"""What befalls whom and when, drawn from a seed.

A run is a sequence of rounds. In a round some faults begin and end, often several at once; then all is whole again,
and everything has to be found within a bound (:mod:`.recovery`). The same seed gives the same rounds; when exactly a
process gets to run, and so which call a fault meets, is the machine's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from random import Random

KINDS = {
    "kill": 4,
    "stop": 3,
    "starve": 2,
    "hold": 3,
    "clock": 2,
    "cut": 3,
    "oneway": 2,
    "split": 2,
    "unplug": 2,
    "slow": 2,
    "reset": 3,
    "full": 2,
    "descriptors": 3,
}
"""Every kind of fault (:mod:`.faults` says what each is), and how often it is drawn."""

_ON_A_PROCESS = frozenset({"kill", "stop", "starve", "hold", "descriptors"})
"""A process has one of these at a time: continued by one fault, it would escape another."""
_ONCE = frozenset({"unplug", "slow", "full"})
"""These are switches: done twice, they would be undone too early."""
_HOUR_S = 3600.0
_NEWCOMER = 0.12
"""The share of rounds in which a node comes while the interpreters of all others are held."""
_HELD_S = 24.0
"""Longer than anything may wait for an interpreter: a shard sweeps out after 10 s whom it has not heard of."""
_ONE_LINK = 0.12
"""The share of rounds in which nothing happens but that one link is cut: then bystanders must not notice."""
_CUT_S = 9.0


@dataclass(frozen=True, slots=True)
class Event:
    """One fault: ``kind`` befalls ``nodes`` ``at`` seconds after the round's beginning, for ``lasts`` seconds."""

    kind: str
    nodes: tuple[int, ...]
    at: float
    lasts: float
    amount: float = 0.0
    names: tuple[str, ...] = ()
    """What to call them, if not by their numbers."""

    def __str__(self) -> str:
        """Say it in a few words."""
        amount = f" {self.amount:+g}" if self.amount else ""
        nodes = "-".join(self.names or (f"n{node}" for node in self.nodes))
        return f"{self.kind} {nodes}{amount} {self.at:.1f}..{self.at + self.lasts:.1f} s"


Round = tuple[Event, ...]


def rounds(seed: int, n: int, kinds: Collection[str]) -> Iterator[Round]:
    """Yield the rounds of a seed, for ever, for ``n`` nodes and of these ``kinds`` alone."""
    rng = Random(seed)
    while True:
        drawn = rng.random()
        if drawn < _NEWCOMER and {"hold", "kill"} <= set(kinds):
            yield _newcomer(rng, n)
        elif drawn > 1 - _ONE_LINK and "cut" in kinds:
            # never nodes 0 and 1, which share a place and have no link between them
            yield (Event("cut", (rng.randrange(2), rng.randrange(2, n)), at=0.0, lasts=_CUT_S),)
        else:
            yield _round(rng, n, kinds)


def _newcomer(rng: Random, n: int) -> Round:
    """All nodes but one hold their interpreters while that one comes again, and publishes."""
    new, *held = rng.sample(range(n), n)
    kill = Event("kill", (new,), at=0.0, lasts=1.0)
    return (kill, *(Event("hold", (node,), at=0.5, lasts=_HELD_S) for node in held))


def _round(rng: Random, n: int, kinds: Collection[str]) -> Round:
    names = sorted(kinds)
    weights = [KINDS[name] for name in names]
    events: list[Event] = []
    taken: set[int] = set()
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        kind = rng.choices(names, weights)[0]
        event = _event(rng, kind, n)
        if kind in _ONCE and any(other.kind == kind for other in events):
            continue
        if kind in _ON_A_PROCESS:
            if taken & set(event.nodes):
                continue
            taken |= set(event.nodes)
        events.append(event)
    return tuple(events)


def _event(rng: Random, kind: str, n: int) -> Event:
    at, lasts, amount = rng.uniform(0, 2), rng.choice((rng.uniform(0.2, 2), rng.uniform(2, 6))), 0.0
    nodes: tuple[int, ...] = (rng.randrange(n),)
    if kind in ("cut", "oneway"):
        nodes = tuple(rng.sample(range(n), 2))
    elif kind == "split":
        nodes = tuple(sorted(rng.sample(range(n), n // 2)))
    elif kind == "full":
        nodes = (rng.randrange(1, n, 2),)
    elif kind == "hold":
        lasts = rng.choice((lasts, rng.uniform(6, 12)))
    elif kind == "clock":
        amount = rng.choice((-_HOUR_S, -10.0, 10.0, _HOUR_S))
    elif kind == "kill":
        # one in three is started again with another time: a battery that is empty, an NTP that is right at last
        amount = rng.choice((0.0, 0.0, 0.0, 0.0, -_HOUR_S, _HOUR_S))
    elif kind == "descriptors":
        amount = rng.randrange(0, 8)
    return Event(kind, nodes, round(at, 2), round(lasts, 2), amount)
