"""Blocks that vLLM gives to nobody else while a worker still copies them.

A request's end, its preemption or a window that moves on gives blocks back to vLLM's pool, in the scheduler, while a
thread of a worker may still be copying them into the page cache. So what is to be published is referenced in the pool
first, as a block is that two requests share, and let go when every worker has said that it is done.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from p2pkv.integrations.vllm_connector.groups import NO_BLOCK


class BlockPool(Protocol):
    """The part of vLLM's block pool that is relied on; the scheduler's thread uses it."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None:
        """Add a reference to blocks."""

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None:
        """Take one away; a block without any may be given out."""


class Holds:
    """Used by the scheduler's thread alone."""

    def __init__(self, n_workers: int) -> None:
        """Hold nothing; a hold ends when ``n_workers`` have reported it."""
        self._n_workers = n_workers
        self._pool: BlockPool | None = None
        self._held: dict[int, tuple[list[Any], int]] = {}  # by number; blocks, and how many workers need them
        self._n_taken = 0

    def bind(self, pool: BlockPool) -> None:
        """Take vLLM's block pool; called once, before any request."""
        self._pool = pool

    def take(self, block_ids: Collection[int]) -> int:
        """Keep blocks that are in use from being given to others, and return the number of the hold."""
        if self._pool is None:
            raise RuntimeError("vLLM has not shown its block pool")
        blocks = [self._pool.blocks[block_id] for block_id in block_ids if block_id != NO_BLOCK]
        self._pool.touch(blocks)
        self._n_taken += 1
        self._held[self._n_taken] = (blocks, self._n_workers)
        return self._n_taken

    def done(self, numbers: Sequence[int]) -> None:
        """Take reports of workers; what all have reported is let go."""
        for number in numbers:
            blocks, n_left = self._held.pop(number)
            if n_left > 1:
                self._held[number] = (blocks, n_left - 1)
            elif self._pool is not None:
                # the last block of a prefix first, as vLLM does: it is of no use without those before it
                self._pool.free_blocks(blocks[::-1])

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._held)
