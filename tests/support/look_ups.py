"""Look-ups in a cluster of many members, and who was asked meanwhile."""

from __future__ import annotations

import os

import numpy as np

from p2pkv import _native
from p2pkv.control.sockets import Request
from p2pkv.control.wire import Kind, Reply
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.view import View, node_key
from p2pkv.page import Keys, Locations, as_locations
from p2pkv.testing.simulated_directory import NoChannels, SimulatedControl
from simulated_directory_nodes import DirectoryNodes

N_NODES = 40
N_PAGES = 128
TIMEOUT_S = 5.0
NAMES = [f"n{i:02}" for i in range(N_NODES)]


class Control(SimulatedControl):
    """Says who was asked."""

    def __init__(self, nodes: DirectoryNodes, reader: str) -> None:
        super().__init__(nodes.reach, nodes.nodes[reader].clock)
        self.asked: list[tuple[str, Kind]] = []

    def _answer(self, request: Request) -> Reply | None:
        self.asked.append((request.address.partition(":")[0], request.kind))
        return super()._answer(request)

    def who(self, kind: Kind | None = None) -> set[str]:
        return {name for name, asked in self.asked if kind in (None, asked)}


class Reader:
    """A node with no page."""

    def __init__(self, nodes: DirectoryNodes, node_id: str = "reader") -> None:
        self.nodes = nodes
        self.node = nodes.nodes[node_id]
        self.control = Control(nodes, node_id)
        self.others = _native.OtherHolders(1 << 16)
        self.directory = DirectoryClient(
            own_key=node_key(node_id),
            shard=self.node.shard,
            client=self.control,
            channels=NoChannels(),
            replicas=2,
            metrics=self.node.metrics,
            clock=self.node.clock,
            others=self.others,
        )
        self.directory.set_view(View(each.member for each in nodes.nodes.values()))

    def look_up(
        self, keys: Keys, *, leading: bool = False, timeout: float = TIMEOUT_S
    ) -> tuple[np.ndarray, Locations]:
        found, raw = self.directory.get(keys, self.node.clock.now + timeout, leading=leading)
        return found.astype(bool), as_locations(raw)

    def holders_of(self, key: Keys, first: np.void) -> set[int]:
        """Return the node keys of those that are known to have a page, ``first`` and the others."""
        return {int(first["owner"]), *as_locations(self.others.of(key))["owner"].tolist()}

    def owners_of(self, key: Keys) -> list[str]:
        ring = self.directory.ring
        return [ring.members[index].node_id for index in ring.owners(key)[0]]


def drawn(nodes: DirectoryNodes, n: int) -> Keys:
    """Draw keys of which the reader's own shard knows nothing."""
    ring = nodes.nodes["reader"].directory.ring
    own = [member.node_id for member in ring.members].index("reader")
    keys = np.frombuffer(os.urandom(16 * (2 * n + 32)), np.uint8).reshape(-1, 16)
    return keys[~(ring.owners(keys) == own).any(axis=1)][:n].copy()


def published(nodes: DirectoryNodes, node_id: str, n: int = N_PAGES) -> Keys:
    """Have a node publish so many of them."""
    keys = drawn(nodes, n)
    nodes.nodes[node_id].publish_keys(keys)
    return keys


def all_by(found: np.ndarray, where: Locations, node_id: str) -> bool:
    return bool(found.all() and (where["owner"] == node_key(node_id)).all())
