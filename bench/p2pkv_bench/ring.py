"""Rings of clusters that nobody has on one machine are built here, to measure what they cost and spare."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from p2pkv.directory.ring import Ring, moved
from p2pkv.directory.view import Member
from p2pkv.page import KEY_BYTES
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rows import Row, Target, make_row

_MEMBERS = (16, 64, 256, 1000)
_REPLICAS = 2
_PAGES = 200_000
_PAGES_A_LOOK_UP = 128
_LOOK_UPS = 100
_LOSSES = 100


def rows(_meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Build rings of members that are only names: who is asked, who holds how much, what a loss moves."""
    random = np.random.default_rng(1)
    for n_members in _MEMBERS:
        plan.tell(f"a ring of {n_members} members")
        members = [Member(f"node-{i}", 1, f"host-{i}:7400") for i in range(n_members)]
        ring = Ring(members, _REPLICAS)
        keys = _keys(random, _PAGES)
        entries = np.bincount(ring.owners(keys).ravel(), minlength=n_members)
        asked = [_n_owners(ring, _keys(random, _PAGES_A_LOOK_UP)) for _ in range(_LOOK_UPS)]
        lost, took_ms = [], []
        for index in random.choice(n_members, min(n_members, _LOSSES), replace=False):
            began = time.perf_counter()
            without = Ring([*members[:index], *members[index + 1 :]], _REPLICAS, like=ring)
            took_ms.append((time.perf_counter() - began) * 1e3)
            lost.append(100 * float(moved(ring, without, keys).mean()))
        measured = (
            (f"owners of a look-up of {_PAGES_A_LOOK_UP} pages", "", asked, Target(64, at_most=True)),
            ("entries of the busiest, as a multiple of a holder's mean", "x", [_imbalance(entries)], None),
            ("pages put again after a loss, by the mean of losses", "%", [float(np.mean(lost))], None),
            ("pages put again after the worst loss", "%", [max(lost)], None),
            ("a ring for a loss", "ms", took_ms, None),
        )
        for case, unit, values, target in measured:
            yield make_row(
                {"p2pkv": values},
                suite="ring",
                case=f"{n_members} members: {case}",
                unit=unit,
                target=target,
            )


def _keys(random: np.random.Generator, n_keys: int) -> NDArray[np.uint8]:
    return random.integers(0, 256, (n_keys, KEY_BYTES), np.uint8)


def _n_owners(ring: Ring, keys: NDArray[np.uint8]) -> float:
    return float(len(np.unique(ring.owners(keys))))


def _imbalance(entries: NDArray[np.int64]) -> float:
    holding = entries[entries > 0]
    return float(holding.max() / holding.mean())
