"""Whom to probe this round: everybody in a small cluster, a shuffled rotation in a large one."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from p2pkv.directory.view import Member

PROBES_A_ROUND = 32
"""A round costs at most this many messages, and still finds a death in one round: in a cluster of n, each
node is probed by 32 others a round on average."""


class Rotation:
    """Deals members out so that nobody comes twice before everybody came once."""

    def __init__(self, random: Random, n_a_turn: int = PROBES_A_ROUND) -> None:
        self._random = random
        self._n_a_turn = n_a_turn
        self._queue: list[str] = []

    def next(self, members: Sequence[Member]) -> list[Member]:
        """Return the members whose turn it is, out of ``members``."""
        if len(members) <= self._n_a_turn:
            return list(members)
        by_id = {member.node_id: member for member in members}
        chosen: dict[str, Member] = {}
        while len(chosen) < self._n_a_turn:
            if not self._queue:
                self._queue = sorted(by_id)
                self._random.shuffle(self._queue)
            node_id = self._queue.pop()
            if node_id in by_id:
                chosen[node_id] = by_id[node_id]
        return list(chosen.values())
