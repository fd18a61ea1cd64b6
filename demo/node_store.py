"""p2pkv as the place where an engine's pages come from and go to."""

from __future__ import annotations

from collections.abc import Sequence

from demo.engine import Outcomes
from demo.paged_kv import PagedKV, Spans
from p2pkv import Node, Pieces


class NodeStore:
    """A ``PageStore`` over a p2pkv node."""

    def __init__(self, node: Node, kv: PagedKV) -> None:
        """Register the cache's memory with ``node``; ``kv`` must be kept until the node is closed."""
        self._node = node
        self._memory = [node.register_memory(array) for array in (kv.k, kv.v)]

    def publish(self, keys: Sequence[str], spans: Spans, timeout: float) -> Outcomes:
        return self._node.publish(keys, Pieces(spans), timeout=timeout)

    def fetch(self, keys: Sequence[str], spans: Spans, timeout: float) -> Outcomes:
        return self._node.fetch(keys, Pieces(spans), timeout=timeout)

    def exists(self, keys: Sequence[str], timeout: float) -> Outcomes:
        return self._node.exists(keys, timeout=timeout)
