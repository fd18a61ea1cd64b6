"""Nodes with a pool and a disk each, and the pages in them: p2pkv's rules for which page stays, without its bytes.

- An engine uses the pages of its prompt from the first one to the last before a miss, and publishes the others at its
  own node.
- A pool evicts what was used longest ago; being published again, or fetched by its own node, is a use. Peers that read
  a page leave no trace at its owner.
- What is published is written to its node's disk, whose oldest pages go first. A page that a peer asks a disk for comes
  back to that node's pool; a node reads its own disk without its pool.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence


class Tier(enum.IntEnum):
    """Where a page was found, as it is looked for."""

    OWN_MEMORY = 0
    PEER_MEMORY = 1
    OWN_DISK = 2
    PEER_DISK = 3


class _Node:
    def __init__(self) -> None:
        # both in the order in which their pages go
        self.pool: OrderedDict[int, None] = OrderedDict()
        self.disk: OrderedDict[int, None] = OrderedDict()


class Cluster:
    """``n_nodes`` with room for so many pages each in memory and on disk; 0 pages on disk: no disk tier."""

    def __init__(self, n_nodes: int, pool_pages: int, disk_pages: int = 0) -> None:
        self._pool_pages = pool_pages
        self._disk_pages = disk_pages
        self._nodes = [_Node() for _ in range(n_nodes)]
        # how many nodes have a page in their pool, and on their disk; none that nobody has
        self._in_pools: dict[int, int] = {}
        self._on_disks: dict[int, int] = {}
        self.n_evicted = 0
        """Pages that pools evicted."""

    def ask(self, node: int, pages: Sequence[int]) -> list[int]:
        """Let an engine at ``node`` ask for these pages; return how many of them it used from each :class:`Tier`."""
        here = self._nodes[node]
        pool, disk, in_pools, on_disks = here.pool, here.disk, self._in_pools, self._on_disks
        own_memory = peer_memory = own_disk = peer_disk = 0
        for page in pages:
            if page in pool:
                pool.move_to_end(page)
                own_memory += 1
            elif page in in_pools:
                peer_memory += 1
            elif page in disk:
                own_disk += 1
            elif page in on_disks:
                self._promote(page)
                peer_disk += 1
            else:
                break
        for page in pages[own_memory + peer_memory + own_disk + peer_disk :]:
            if page in pool:
                pool.move_to_end(page)
                continue
            self._commit(here, page)
            if self._disk_pages and page not in disk:
                _add(disk, page, self._disk_pages, on_disks)
        return [own_memory, peer_memory, own_disk, peer_disk]  # as Tier has them

    def leading(self, node: int, pages: Sequence[int]) -> int:
        """Return how many pages of the prompt the node's own pool has, from the first to the last before a miss."""
        pool = self._nodes[node].pool
        for n, page in enumerate(pages):
            if page not in pool:
                return n
        return len(pages)

    def _promote(self, page: int) -> None:
        owner = next(node for node in self._nodes if page in node.disk)
        self._commit(owner, page)

    def _commit(self, node: _Node, page: int) -> None:
        self.n_evicted += _add(node.pool, page, self._pool_pages, self._in_pools)


def _add(pages: OrderedDict[int, None], page: int, room: int, holders: dict[int, int]) -> bool:
    """Add a page that is not there; return whether another had to go for it."""
    pages[page] = None
    holders[page] = holders.get(page, 0) + 1
    if len(pages) <= room:
        return False
    oldest = pages.popitem(last=False)[0]
    n_holders = holders.pop(oldest)
    if n_holders > 1:
        holders[oldest] = n_holders - 1
    return True
