"""Nodes of one cluster in this process, each of which joins the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from p2pkv import Config, Node


@contextmanager
def joined_nodes() -> Iterator[Callable[..., Node]]:
    """Give what starts one more, by its id and settings; all are closed in the end, the first one last."""
    nodes: list[Node] = []

    def start(node_id: str, **settings: object) -> Node:
        join = [node.address for node in nodes[:1]]
        defaults = {"pool_size": "1MiB", "buffer_size": 0, "deadline": 5.0, "join": join}
        nodes.append(Node.start(Config(node_id=node_id, **(defaults | settings))))  # type: ignore[arg-type]
        return nodes[-1]

    try:
        yield start
    finally:
        for node in reversed(nodes):
            node.close()
