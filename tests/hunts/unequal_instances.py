"""vLLM instances of the hunts, prompts that they hand to each other, and the loads of these.

Each instance has ranks with nodes of their own, and its blocks are given out and taken back as vLLM would.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from p2pkv import Node
from p2pkv.integrations.vllm_connector.handoff import Handoff
from p2pkv.testing.lateness import Lateness
from vllm_ranks import KV, N_BLOCKS, Model, Server, Shape


class Instance:
    """A vLLM instance with nodes of its own."""

    def __init__(
        self,
        name: str,
        role: str,
        shape: Shape,
        model: Model,
        *,
        lease: float,
        deadline: float,
        start_node: Callable[[str], Node],
        **settings: object,
    ) -> None:
        """Start the nodes, each by its name; ``settings`` are more of the connector's."""
        self.name, self.shape, self.lease, self.deadline = name, shape, lease, deadline
        with ThreadPoolExecutor(self.shape.n_ranks) as pool:
            self.nodes = list(pool.map(start_node, [f"{name}-{i}" for i in self.ranks]))
        self.server = Server(self.nodes, role, shape, model, lease, deadline, **settings)
        self.free = list(range(1, N_BLOCKS))
        self.is_lost = False
        self.kept: list[dict[str, list[list[int]]]] = [{} for _ in self.ranks]
        """By rank, the requests whose blocks prefill keeps, and these."""
        self.loads: dict[str, Load] = {}

    @property
    def ranks(self) -> range:
        return range(self.shape.n_ranks)

    def __str__(self) -> str:
        return (
            f"{self.name} {self.shape.tp}x{self.shape.stages} blocks {self.shape.block}/{self.shape.n_tiles}"
        )

    def take(self, chance: random.Random, n_tokens: int, n_kinds: int) -> list[list[int]] | None:
        """Give a prompt blocks, if there are enough."""
        n = -(-n_tokens // self.shape.block)
        if n * n_kinds > len(self.free):
            return None
        chance.shuffle(self.free)
        taken, self.free = self.free[: n * n_kinds], self.free[n * n_kinds :]
        return [taken[kind * n : (kind + 1) * n] for kind in range(n_kinds)]

    def give_back(self, tables: Sequence[Sequence[int]]) -> None:
        self.free += [block for table in tables for block in table]

    def used(self) -> set[int]:
        return set(range(1, N_BLOCKS)) - set(self.free)

    def close(self) -> None:
        self.is_lost = True
        with ThreadPoolExecutor(self.shape.n_ranks) as pool:
            list(pool.map(lambda rank: rank.side.close(), self.server.ranks))


@dataclass(eq=False)
class HandOver:
    """One prompt, and what befalls it."""

    name: str
    kv: KV
    prefill: Instance
    handoff: Handoff
    tables: list[list[int]]
    fault: str
    loads: list[Load] = field(default_factory=list)
    is_spoilt: bool = False
    late: Lateness = field(default_factory=lambda: Lateness().__enter__())
    """Of the machine, since it began."""
    n_planned: int = 0
    """What is still to happen to it."""
    offered_at: float = 0.0
    """When the last rank did."""
    taken_at: float | None = None
    """When all loads had ended."""
    had_at: float | None = None
    """When an instance had it on all its ranks."""


@dataclass(eq=False)
class Load:
    """What one decode instance takes of it."""

    request_id: str
    of: HandOver
    decode: Instance
    tables: list[list[int]]
    waiting: dict[int, float]
    """The ranks that load, and since when."""
    n_right: int = 0
    """Ranks that have it."""
