"""One of many node processes: ``python -m p2pkv_bench.members``; it does what stdin says, see :mod:`.processes`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from p2pkv.config import Config
from p2pkv.directory.ring import Ring
from p2pkv.node import Node
from p2pkv.page import Namespace
from p2pkv.testing.processes import obey
from p2pkv_bench.errors import BenchError

PAGE_NBYTES = 4096
_LOOK_S = 0.05
_BATCH = 128


def key(owner: str, number: int) -> str:
    """Return the key of a page that a member publishes."""
    return f"{owner}/{number}"


class MemberProcess:
    """Its methods are the commands."""

    def __init__(self) -> None:
        self._node: Node | None = None

    @property
    def node(self) -> Node:
        """The node, once it is started."""
        assert self._node is not None
        return self._node

    def start(self, config: dict[str, Any]) -> None:
        """Start the node."""
        self._node = Node.start(Config.load(config, environ={}))

    def wait_for(self, n_members: int, seconds: float) -> float:
        """Return the time, by the monotonic clock, at which this node sees so many members alive."""
        until = time.monotonic() + seconds
        while self._n_alive() != n_members:
            if time.monotonic() > until:
                raise BenchError(f"{self.node.node_id} sees {self._n_alive()} members, not {n_members}")
            time.sleep(_LOOK_S)
        return time.monotonic()

    def _n_alive(self) -> int:
        return sum(member.state.name == "ALIVE" for member in self.node.members())

    def publish(self, n_pages: int) -> int:
        """Publish pages of this node's own; return how many are."""
        memory = np.ones((_BATCH, PAGE_NBYTES), np.uint8)
        n = 0
        with self.node.register_memory(memory):
            for first in range(0, n_pages, _BATCH):
                keys = [key(self.node.node_id, first + i) for i in range(min(_BATCH, n_pages - first))]
                n += int(self.node.publish(keys, memory[: len(keys)]).sum())
        return n

    def look_up(self, owners: list[str], n_pages: int) -> dict[str, float]:
        """Look up the first pages of each of ``owners``, at once for each; return how many there are, and the times."""
        found, took = 0, []
        for owner in owners:
            keys = [key(owner, number) for number in range(n_pages)]
            began = time.perf_counter()
            hits = self.node.exists(keys)
            took.append((time.perf_counter() - began) * 1e3)
            found += int(hits.sum())
        return {"found": found, "asked": len(owners) * n_pages, "ms": float(np.median(took))}

    def owners_of(self, owner: str, n_pages: int) -> int:
        """Return how many members hold the entries of pages of ``owner``, as this node sees them."""
        keys = [key(owner, number) for number in range(n_pages)]
        ring = Ring(self.node.members(), self.node.config.replicas)
        return len(np.unique(ring.owners(Namespace(self.node.config.namespace).hash(keys))))

    def counters(self, names: list[str]) -> list[float]:
        """Return counters of this node."""
        counters = self.node.counters()
        return [counters.get(name, 0.0) for name in names]

    def close(self) -> None:
        """Leave."""
        if self._node is not None:
            self._node.close()


if __name__ == "__main__":
    member = MemberProcess()
    obey(member)
    member.close()
