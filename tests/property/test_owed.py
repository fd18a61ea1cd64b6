"""Whatever owners miss they are given in the end: also what they miss while they are given something."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pkv.directory import owed
from p2pkv.directory.owed import Due, Owed
from p2pkv.page import Keys

MOST_KEYS = 8
OPS = st.lists(st.sampled_from(["miss 1", "miss 3", "miss 6", "begin", "paid", "missed"]), max_size=40)


def keys_of(numbers: list[int]) -> Keys:
    return np.array(numbers, np.uint8).reshape(-1, 1)


class Publisher:
    """Gives one owner what it has missed; ``lacks`` is the truth."""

    def __init__(self) -> None:
        self.owed = Owed(Random(1))
        self.lacks: set[int] = set()
        self._n_missed = 0
        self._now = 0.0
        self._due: Due | None = None
        self._told: set[int] = set()

    def miss(self, n: int) -> None:
        numbers = list(range(self._n_missed, self._n_missed + n))
        self._n_missed += n
        self.lacks.update(numbers)
        self.owed.add("a", keys_of(numbers), self._now)

    def begin(self) -> None:
        """Give it what is due: all that it lacks at this moment, or these keys."""
        self._now += 1000.0
        self._due = self.owed.due(self._now)
        if self._due is not None:
            given = self.lacks if self._due.keys is None else set(self._due.keys[:, 0].tolist())
            self._told = set(given)

    def paid(self) -> None:
        if self._due is not None:
            self.lacks -= self._told
            self.owed.paid(self._due)
            self._due = None

    def missed(self) -> None:
        if self._due is not None:
            self.owed.missed(self._due.node_id, self._now)
            self._due = None


@settings(deadline=None, max_examples=500)
@given(ops=OPS)
def test_what_was_missed_is_given_in_the_end(ops: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owed, "MOST_KEYS", MOST_KEYS)
        publisher = Publisher()
        for op in ops:
            name, _, n = op.partition(" ")
            getattr(publisher, name)(*([int(n)] if n else []))
        for _ in range(100):
            publisher.begin()
            publisher.paid()
        assert publisher.lacks == set()
        assert publisher.owed.next_due() is None
