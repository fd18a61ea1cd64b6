"""What befalls hosts, their engines, their keepers and etcd, drawn from a seed as :mod:`.schedule` does for nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from random import Random

from .schedule import Event, Round

KINDS = {
    "kill": 5,
    "stop": 4,
    "starve": 1,
    "hold": 3,
    "end": 2,
    "drain": 2,
    "keeper": 2,
    "etcd": 3,
    "cut": 2,
    "oneway": 1,
    "unplug": 1,
    "slow": 1,
    "reset": 2,
    "bump": 5,
    "rotate": 1,
}
"""Every kind, and how often it is drawn; ``rotate`` is not drawn, but comes in every fifth round."""

_ON_A_PROCESS = frozenset({"kill", "stop", "starve", "hold", "end", "drain", "keeper"})
"""A process has one of these at a time; of a host's keeper its node counts, which has to give it the memory."""
_OF_THE_NETWORK = frozenset({"cut", "oneway", "unplug", "slow", "reset"})
"""Not in a round with a bump, which whoever is cut off does not hear of (docs/membership.md)."""
_ONCE = frozenset({"unplug", "slow", "etcd", "bump"})
_ROTATE_EVERY = 5
_HOST = 0.5
"""The share of what befalls processes that befalls a host's node."""


def rounds(seed: int, names: list[str], n_hosts: int, kinds: Collection[str]) -> Iterator[Round]:
    """Yield the rounds of a seed, for ever, of these ``kinds`` alone; ``names`` are those of all processes."""
    rng = Random(seed)
    drawn = sorted(set(kinds) - {"rotate"})
    at = 0
    while True:
        at += 1
        if "rotate" in kinds and (at % _ROTATE_EVERY == 0 or not drawn):
            yield (Event("rotate", (), at=0.0, lasts=0.0),)
        else:
            yield _round(rng, names, n_hosts, drawn)


def _round(rng: Random, names: list[str], n_hosts: int, kinds: list[str]) -> Round:
    weights = [KINDS[kind] for kind in kinds]
    events: list[Event] = []
    taken: set[int] = set()
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        kind = rng.choices(kinds, weights)[0]
        event = _event(rng, kind, names, n_hosts)
        there = {other.kind for other in events}
        if kind in _ONCE and kind in there:
            continue
        if (kind == "bump" and there & _OF_THE_NETWORK) or (kind in _OF_THE_NETWORK and "bump" in there):
            continue
        if kind in _ON_A_PROCESS:
            if taken & set(event.nodes):
                continue
            taken |= set(event.nodes)
        events.append(event)
    return tuple(events)


def _event(rng: Random, kind: str, names: list[str], n_hosts: int) -> Event:
    at, lasts = rng.uniform(0, 2), rng.choice((rng.uniform(0.2, 2), rng.uniform(2, 6)))
    n, host = len(names), rng.randrange(n_hosts)
    engine = rng.randrange(n_hosts, n)
    nodes: tuple[int, ...] = (host if rng.random() < _HOST else engine,)
    if kind in ("drain", "keeper", "unplug", "slow", "reset"):
        nodes = (host,)
    elif kind == "bump":
        # half of them begin before anything else befalls anybody, so that everybody hears of them
        nodes, at = (engine,), rng.choice((0.0, at))
    elif kind == "etcd":
        nodes = ()
    elif kind in ("cut", "oneway"):
        # between two hosts, or a host and etcd, whose place comes after the last process
        nodes = tuple(rng.sample([*range(n_hosts), n], 2))
    if kind == "drain":
        lasts = max(lasts, 3.0)
    whom = tuple(names[node] if node < n else "etcd" for node in nodes)
    return Event(kind, nodes, round(at, 2), round(lasts, 2), names=whom)
