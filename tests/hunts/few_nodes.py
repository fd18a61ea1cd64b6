"""A few nodes in one process with small pools, some with disks: where each page is can be looked up directly."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hunts.frame import Broken, Tally
from p2pkv import Config, Node

PAGE = 8192
POOL = 10 * PAGE
"""So small that most publishes evict."""
N_KEYS = 24
TIMEOUT = 5.0
_MET_S = 60.0


@dataclass
class Known:
    """One node, and where its disk is, if it has one."""

    node_id: str
    disk: Path | None
    memory: np.ndarray
    node: Node | None = None

    @property
    def there(self) -> Node:
        """The node, which is running."""
        assert self.node is not None
        return self.node

    def places(self, keys: Sequence[str]) -> list[str]:
        """Look where each page is here, without asking what is hunted: ``pool``, ``disk`` or nowhere."""
        caching = self.there._parts.caching
        assert caching is not None
        _, ids = caching.cache.hash(keys)
        in_pool = caching.pool.lookup(ids)[0].tolist()
        on_disk = caching.tier.contains(ids).tolist() if caching.tier is not None else [0] * len(keys)
        return [
            "pool" if here else "disk" if there else "" for here, there in zip(in_pool, on_disk, strict=True)
        ]


class FewNodes:
    """The nodes of one schedule and what was done with them; a hunt's world adds steps and an oracle."""

    batch = 6
    """How many keys a step names at the most."""

    def __init__(
        self, chance: random.Random, tally: Tally, folder: Path, *, n_nodes: int, share_of_disks: float
    ) -> None:
        self.chance, self.tally = chance, tally
        self.story: list[str] = []
        self.nodes = [
            Known(
                f"n{i}",
                folder / f"disk{i}" if chance.random() < share_of_disks else None,
                np.zeros((N_KEYS, PAGE), np.uint8),
            )
            for i in range(n_nodes)
        ]

    def start_all(self) -> None:
        for known in self.nodes:
            self.start(known)
        self.wait_met()

    def start(self, known: Known, **settings: object) -> None:
        others = [other.there.address for other in self.present()]
        if known.disk is not None:
            settings |= {"disk_size": 8 << 20, "disk_path": str(known.disk)}
        known.node = Node.start(
            Config(
                node_id=known.node_id,
                pool_size=POOL,
                buffer_size=0,
                deadline=TIMEOUT,
                join=others,
                **settings,  # type: ignore[arg-type]
            )
        )
        known.node.register_memory(known.memory)

    def close(self, known: Known) -> None:
        known.there.close()
        known.node = None

    def close_all(self) -> None:
        for known in self.present():
            self.close(known)

    def present(self) -> list[Known]:
        return [known for known in self.nodes if known.node is not None]

    def one(self) -> Known:
        """Return one of those that are running."""
        return self.chance.choice(self.present())

    def some(self, most: int = 0) -> list[str]:
        """Return a run of keys, at most ``most`` or a batch of them."""
        first = self.chance.randrange(N_KEYS)
        return [f"k{(first + i) % N_KEYS}" for i in range(self.chance.randint(1, most or self.batch))]

    def wait_met(self) -> None:
        until = time.monotonic() + _MET_S
        while any(len(known.there.members()) != len(self.present()) for known in self.present()):
            if time.monotonic() > until:
                raise self.broken(f"the nodes have not met within {_MET_S:g} s")
            time.sleep(0.005)  # looked at again; nobody says so

    def lose_disk(self, known: Known) -> None:
        if known.disk is not None:
            shutil.rmtree(known.disk, ignore_errors=True)

    def broken(self, what: str) -> Broken:
        return Broken("\n".join([what, *self.story[-40:]]))
