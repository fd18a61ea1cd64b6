"""Nodes that have a pool, a shard, the directory's client and an announcer, in one thread and virtual time."""

from __future__ import annotations

import os
from random import Random

import numpy as np

from p2pkv import _native
from p2pkv.directory.announcer import Announcer
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.view import Member, View, node_key
from p2pkv.metrics import Metrics
from p2pkv.page import Keys, row_pieces
from p2pkv.pool import Pool
from p2pkv.testing.simulated_directory import NoChannels, SimulatedControl
from p2pkv.testing.simulated_network import SimulatedClock

NBYTES = 4096
POOL_NBYTES = 4 << 20
BOOT = 1_000


class DirectoryNode:
    """One of :class:`DirectoryNodes`."""

    def __init__(self, nodes: DirectoryNodes, node_id: str) -> None:
        self.member = Member(node_id, BOOT, f"{node_id}:1")
        self.is_stopped = False
        self.clock = SimulatedClock(nodes.now)
        self.shard = _native.Shard(1 << 16)
        self.shard.set_time(int(nodes.now))
        self._page = np.zeros((1, nodes.page_nbytes), np.uint8)
        granule = min(NBYTES, nodes.page_nbytes)
        self.pool = Pool(POOL_NBYTES, owner=node_key(node_id), boot=BOOT, granule=granule)
        self.shard.serve_held(self.pool.native)
        self.metrics = Metrics()
        self.control = SimulatedControl(nodes.reach, self.clock)
        self.directory = DirectoryClient(
            own_key=node_key(node_id),
            shard=self.shard,
            client=self.control,
            channels=NoChannels(),
            replicas=2,
            metrics=self.metrics,
            clock=self.clock,
        )
        self.announcer = Announcer(
            self.pool, self.directory, self.metrics, clock=self.clock, random=Random(len(nodes.nodes))
        )
        self.directory.on_missed = self.announcer.owe
        self.next_step = nodes.now

    def publish(self, n_pages: int) -> Keys:
        """Publish pages of random bytes, and return their keys."""
        keys = np.frombuffer(os.urandom(16 * n_pages), np.uint8).reshape(n_pages, 16)
        self.publish_keys(keys)
        return keys

    def publish_keys(self, keys: Keys) -> None:
        """Publish pages under these keys."""
        memory = np.repeat(self._page, len(keys), axis=0)
        told = self.directory.publish(self.pool, keys, row_pieces(memory), self.clock.now + 5.0)
        assert told.is_told.all()

    def lose_shard(self, n_places: int = 1 << 16) -> None:
        """Forget what others were told to keep here; only :attr:`shard` shows what comes from now on."""
        self.shard = _native.Shard(n_places)
        self.shard.set_view([node_key(node_id) for node_id in "abc"], [BOOT] * 3)

    def n_found(self, keys: Keys) -> int:
        """Look keys up, and return of how many it is known where they are."""
        found, _ = self.directory.get(keys, self.clock.now + 5.0)
        return int(found.sum())

    def close(self) -> None:
        """Release what it has."""
        self.announcer.close()
        self.shard.serve_held(None)
        self.pool.release_memory()


class DirectoryNodes:
    """Moves time for all of them; who is stopped neither answers nor runs."""

    def __init__(self, *node_ids: str, page_nbytes: int = NBYTES) -> None:
        """``page_nbytes`` is what a published page has; smaller ones are more in the same pool."""
        self.now = 1000.0
        self.page_nbytes = page_nbytes
        self.nodes: dict[str, DirectoryNode] = {}
        for node_id in node_ids:
            self.nodes[node_id] = DirectoryNode(self, node_id)
        self.set_view(*node_ids)
        self.run(0.1)  # the first view is nobody's news any more

    def set_view(self, *node_ids: str) -> None:
        """Let all nodes see these members."""
        for node in self.nodes.values():
            self.show(node, *node_ids)

    def show(self, node: DirectoryNode, *node_ids: str) -> None:
        """Let one node see these members."""
        node.directory.set_view(View(self.nodes[node_id].member for node_id in node_ids))
        node.announcer.ring_changed()

    def add(self, node_id: str) -> DirectoryNode:
        """Have one more node, which nobody sees yet."""
        self.nodes[node_id] = DirectoryNode(self, node_id)
        return self.nodes[node_id]

    def remove(self, node_id: str) -> None:
        """Have a node no more."""
        self.nodes.pop(node_id).close()

    def reach(self, address: str) -> tuple[_native.Shard, int] | None:
        """Return the shard that answers at an address."""
        node = self.nodes.get(address.partition(":")[0])
        return None if node is None or node.is_stopped else (node.shard, node.member.boot_epoch)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, min((n.next_step for n in self.nodes.values()), default=end))
            for node in self.nodes.values():
                node.shard.set_time(int(self.now))
                node.clock.now = max(node.clock.now, self.now)
                if node.next_step <= self.now and not node.is_stopped:
                    node.announcer.tell_changed(idle=0.0, gather=0.0)
                    node.next_step = node.clock.now + min(node.announcer.step(), 1.0)
                elif node.is_stopped:
                    node.next_step = self.now + 1.0

    def close(self) -> None:
        """Release all."""
        for node in self.nodes.values():
            node.close()
