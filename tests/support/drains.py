"""Nodes of one cluster that a test starts to have some of them drain, and what it looks for in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

import pages
from cluster import eventually
from p2pkv import Config, Drained, Node

PAGE = 4096
POOL = 64 * PAGE
KEYS = [f"k{i}" for i in range(40)]


@contextmanager
def starting() -> Iterator[Callable[..., Node]]:
    """Give what starts a node by its id and settings, and returns it when all know each other; close them."""
    nodes: list[Node] = []

    def start(node_id: str, **settings: object) -> Node:
        defaults = {"pool_size": POOL, "buffer_size": 0, "deadline": 5.0}
        join = [node.address for node in nodes][:1]
        nodes.append(Node.start(Config(node_id=node_id, join=join, **(defaults | settings))))  # type: ignore[arg-type]
        eventually(lambda: all(len(node.members()) == len(nodes) for node in nodes), 30.0)
        return nodes[-1]

    yield start
    for node in reversed(nodes):
        node.close()


def published(node: Node, keys: list[str] = KEYS, nbytes: int = PAGE) -> int:
    """Publish a page for each key; say how many were."""
    memory = np.zeros((len(keys), nbytes), np.uint8)
    pages.fill(memory, keys)
    with node.register_memory(memory):
        return sum(
            int(node.publish(keys[i : i + 8], memory[i : i + 8]).sum()) for i in range(0, len(keys), 8)
        )


def found(node: Node, keys: list[str] = KEYS) -> int:
    """Say how many pages a node finds; a wrong byte is an error."""
    memory = np.zeros((len(keys), PAGE), np.uint8)
    with node.register_memory(memory):
        hits = node.fetch(keys, memory)
    assert pages.wrong(memory, keys, hits) == []
    return int(hits.sum())


def in_pool(node: Node, keys: list[str] = KEYS) -> list[bool]:
    """Say which pages are in a pool, guests among them."""
    caching = node._parts.caching
    assert caching is not None
    there, _ = caching.pool.lookup(caching.cache.hash(keys)[1])
    return [bool(one) for one in there]


def left(drained: Drained) -> int:
    """Say how many pages were not handed over."""
    return drained.n_pages - drained.n_handed_over
