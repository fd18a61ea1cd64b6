"""At which node each request is computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from p2pkv.errors import ConfigError
from p2pkv_bench.options import names_of
from p2pkv_bench.replay.simulation import Cluster

Placement = Callable[[Cluster, Sequence[int]], int]
"""The node for a request's pages, given what each node has."""

_SEED = 20_250_101


def _round_robin(n_nodes: int) -> Placement:
    turn = -1

    def place(cluster: Cluster, pages: Sequence[int]) -> int:
        nonlocal turn
        turn = (turn + 1) % n_nodes
        return turn

    return place


def _at_random(n_nodes: int) -> Placement:
    numbers = random.Random(_SEED)  # noqa: S311
    return lambda cluster, pages: numbers.randrange(n_nodes)


def _prefix(n_nodes: int) -> Placement:
    """Where it and all before it come to the fewest pages to compute, as what lies in a node's memory is not."""
    computed = [0] * n_nodes

    def place(cluster: Cluster, pages: Sequence[int]) -> int:
        after = [computed[node] + len(pages) - cluster.leading(node, pages) for node in range(n_nodes)]
        chosen = min(range(n_nodes), key=after.__getitem__)
        computed[chosen] = after[chosen]
        return chosen

    return place


_PLACEMENTS = {"round_robin": _round_robin, "random": _at_random, "prefix": _prefix}
PLACEMENTS = tuple(_PLACEMENTS)


def placement(name: str, n_nodes: int) -> Placement:
    """Return the placement of that name; raises :class:`~p2pkv.errors.ConfigError` for others."""
    chosen = names_of("--placement", name, PLACEMENTS)
    if len(chosen) != 1:
        raise ConfigError(f"--placement takes one of {', '.join(PLACEMENTS)}")
    return _PLACEMENTS[chosen[0]](n_nodes)
