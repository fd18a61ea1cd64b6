"""Which entries which owners have missed, and when they are given them again.

What is owed is keys, not nodes: one answer that comes late must not have everything told again that its owner owns.
An owner that goes on missing is tried less and less often, and not by all at the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import NamedTuple

from p2pkv.page import Keys

MOST_KEYS = 1 << 16
"""Owed to a node one by one; beyond it all its entries are compared instead."""
_FIRST_S = 1.0
_LONGEST_S = 60.0
"""Until an owner is given what it missed; doubled from the first to the second while it goes on missing."""


class Due(NamedTuple):
    """What a node is to be given now."""

    node_id: str
    keys: Keys | None
    """None: everything."""
    number: int
    """Of everything that it has missed; 0 of keys. What it misses while it is told everything may get another one."""


@dataclass(slots=True)
class _Debt:
    due: float
    wait_s: float
    batches: list[Keys] = field(default_factory=list)
    n_keys: int = 0
    everything: int = 0
    """The number of what :meth:`Owed.due` names, if that is everything; else 0."""
    is_being_told: bool = False
    """Of everything a part may have been told: what is missed now counts by itself."""


class Owed:
    """Not thread-safe. Times are those of ``now`` in each call."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._debts: dict[str, _Debt] = {}
        self._numbers = count(1)

    def add(self, node_id: str, keys: Keys, now: float) -> None:
        """Remember that a node has missed these."""
        debt = self._debts.get(node_id)
        if debt is None:
            debt = self._debts[node_id] = _Debt(now + self._jittered(_FIRST_S), _FIRST_S)
        if debt.everything and not debt.is_being_told:
            return
        if debt.n_keys + len(keys) > MOST_KEYS:
            debt.batches, debt.n_keys = [], 0
            debt.everything, debt.is_being_told = next(self._numbers), False
        else:
            debt.batches.append(keys)
            debt.n_keys += len(keys)

    def next_due(self) -> float | None:
        """Return when the next is to be given something; None if nothing is owed."""
        return min((debt.due for debt in self._debts.values()), default=None)

    def due(self, now: float) -> Due | None:
        """Return who is to be given what now; say how it went next."""
        for node_id, debt in self._debts.items():
            if debt.due > now:
                continue
            if debt.everything:
                debt.is_being_told = True
                return Due(node_id, None, debt.everything)
            return Due(node_id, debt.batches[0], 0)
        return None

    def paid(self, due: Due) -> None:
        """Note that the node has what :meth:`due` named; what it has missed since is owed on."""
        debt = self._debts.get(due.node_id)
        if debt is None:
            return
        if due.keys is None:
            if debt.everything == due.number:
                debt.everything, debt.is_being_told = 0, False
        elif any(batch is due.keys for batch in debt.batches):
            debt.batches = [batch for batch in debt.batches if batch is not due.keys]
            debt.n_keys -= len(due.keys)
        if not debt.batches and not debt.everything:
            del self._debts[due.node_id]

    def missed(self, node_id: str, now: float) -> None:
        """Note that the node did not take it, or not all: it is left alone for a while."""
        debt = self._debts.get(node_id)
        if debt is not None:
            debt.wait_s = min(2 * debt.wait_s, _LONGEST_S)
            debt.due = now + self._jittered(debt.wait_s)

    def keep(self, node_ids: set[str]) -> None:
        """Forget what is owed to others: they are gone, and their entries have moved."""
        self._debts = {node_id: debt for node_id, debt in self._debts.items() if node_id in node_ids}

    def _jittered(self, seconds: float) -> float:
        return seconds * self._random.uniform(0.5, 1.0)
