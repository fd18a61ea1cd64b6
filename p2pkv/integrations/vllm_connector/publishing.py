"""Publishing blocks behind the model's back: a thread copies them into the pool while the next step runs.

Until it has, the blocks must not be given to others: their request keeps them when it finishes
(:meth:`Publishing.is_idle`), and one that is preempted gives them up only after :meth:`Publishing.drop`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection

from p2pkv.integrations.boundary import Boundary
from p2pkv.integrations.vllm_connector.caches import KVCaches
from p2pkv.integrations.vllm_connector.messages import Publish
from p2pkv.integrations.vllm_connector.prefixes import Part
from p2pkv.integrations.vllm_connector.stats import Tally
from p2pkv.node import Node

_BATCH_BLOCKS = 256
"""Guess; large enough for the directory's round trip not to count, small enough to keep finished requests short."""
_QUEUE_SHARE = 8
"""One block in so many may wait here; a request whose blocks find no place keeps them to itself."""


class Publishing:
    """One thread, started and ended by its owner. Thread-safe."""

    def __init__(self, node: Node, caches: KVCaches, part: Part, boundary: Boundary, tally: Tally) -> None:
        """Start the thread."""
        self._node, self._caches, self._part = node, caches, part
        self._boundary, self._tally = boundary, tally
        self._changed = threading.Condition()  # guards what follows
        self._queue: deque[Publish] = deque()
        self._n_queued = 0  # blocks
        self._stream: int | None = None
        self._under_way: list[Publish] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="p2pkv-vllm-publish", daemon=True)
        self._thread.start()

    def add(self, publish: Publish, stream: int | None) -> None:
        """Queue blocks, unless too many wait already; what is queued on ``stream`` now is waited for."""
        with self._changed:
            n_blocks = len(publish.block_ids)
            if not self._is_closed and self._n_queued + n_blocks <= self._caches.n_blocks // _QUEUE_SHARE:
                self._queue.append(publish)
                self._n_queued += n_blocks
                self._stream = stream  # the worker's; it stays the same
                self._changed.notify_all()
                return
        self._tally.count("prefix_blocks_unpublished", n_blocks)

    def is_idle(self, request_id: str) -> bool:
        """Whether nothing of a request is left to publish: its blocks may be given to others."""
        with self._changed:
            return not any(p.request_id == request_id for p in (*self._under_way, *self._queue))

    def drop(self, request_ids: Collection[str]) -> None:
        """Give up what requests have queued; blocks while something of theirs is being copied, a deadline at most."""
        with self._changed:
            kept = deque(p for p in self._queue if p.request_id not in request_ids)
            self._n_queued -= sum(len(p.block_ids) for p in self._queue if p.request_id in request_ids)
            self._queue = kept
            self._changed.wait_for(lambda: not any(p.request_id in request_ids for p in self._under_way))

    def close(self) -> None:
        """End the thread; close the node before, so that nothing is waited for. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._take():
            # of two requests with one prefix both may have computed it
            pages = {
                h: b for publish in batch for h, b in zip(publish.hashes, publish.block_ids, strict=True)
            }
            n_published = self._boundary.call("publish", lambda pages=pages: self._publish(pages), miss=0)  # type: ignore[misc]
            self._tally.count("prefix_blocks_published", n_published)
            self._tally.count("prefix_blocks_unpublished", len(pages) - n_published)
            with self._changed:
                self._under_way = []
                self._changed.notify_all()

    def _take(self) -> list[Publish]:
        """Return what to publish next; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            n_blocks = 0
            while self._queue and n_blocks < _BATCH_BLOCKS:
                self._under_way.append(self._queue.popleft())
                n_blocks += len(self._under_way[-1].block_ids)
            self._n_queued -= n_blocks
            return list(self._under_way)

    def _publish(self, pages: dict[bytes, int]) -> int:
        keys = [self._part.key(block_hash) for block_hash in pages]
        pieces = self._caches.pieces(list(pages.values()))
        with self._changed:
            stream = self._stream
        return int(self._node.publish(keys, pieces, stream=stream).sum())
