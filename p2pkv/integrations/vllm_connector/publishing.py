"""Publishing blocks behind the model's back: a thread copies them into the pool while the next step runs.

Until it has, the blocks are not given to others: the scheduler holds them until it hears that they are done
(``holds.py``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from p2pkv.integrations.boundary import Boundary, guarded
from p2pkv.integrations.vllm_connector.caches import KVCaches
from p2pkv.integrations.vllm_connector.messages import Publish
from p2pkv.integrations.vllm_connector.prefixes import Part
from p2pkv.integrations.vllm_connector.residents import BlockName, Residents
from p2pkv.integrations.vllm_connector.stats import Tally
from p2pkv.integrations.vllm_connector.weights import bare
from p2pkv.node import Node
from p2pkv.tracing import about

_BATCH_BLOCKS = 256
"""Guess; large enough for the directory's round trip not to count, small enough to keep finished requests short."""
_QUEUE_SHARE = 8
"""One block in so many may wait here, or those of a single step; a request whose blocks find no place keeps them."""


class Publishing:
    """One thread, started and ended by its owner. Thread-safe."""

    def __init__(
        self,
        node: Node,
        caches: KVCaches,
        parts: Sequence[Part],
        boundary: Boundary,
        tally: Tally,
        *,
        residents: Residents | None = None,
    ) -> None:
        """Start the thread. ``parts``: the rank's, by group. ``residents`` is told what is published, before it is."""
        self._residents = residents
        self._node, self._caches, self._parts = node, caches, parts
        self.boundary, self._tally = boundary, tally
        self._changed = threading.Condition()  # guards what follows
        self._queue: deque[Publish | Callable[[], None]] = deque()
        self._n_queued = 0  # blocks
        self._stream: int | None = None
        self._done: list[int] = []  # holds to report
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="p2pkv-vllm-publish", daemon=True)
        self._thread.start()

    def add(self, publish: Publish, stream: int | None) -> None:
        """Queue blocks, unless others wait and all together would be too many.

        What is queued on ``stream`` now is waited for. Its hold is done when they are copied, or at once.
        """
        n_blocks = _n_blocks(publish)
        with self._changed:
            most = self._caches.n_blocks // _QUEUE_SHARE
            # a small cache, or a long step, has more at once: alone it is taken, or it would never be shared
            if not self._is_closed and (self._n_queued == 0 or self._n_queued + n_blocks <= most):
                self._queue.append(publish)
                self._n_queued += n_blocks
                self._stream = stream  # the worker's; it stays the same
                self._changed.notify_all()
                return
        self.skip(publish)

    def then(self, task: Callable[[], None]) -> None:
        """Run ``task`` when what is queued by now has been published; not if this is closed before."""
        with self._changed:
            if not self._is_closed:
                self._queue.append(task)
                self._changed.notify_all()

    def skip(self, publish: Publish) -> None:
        """Take blocks for done without publishing them."""
        with self._changed:
            self._done.append(publish.hold)
        self._tally.count("prefix_blocks_unpublished", _n_blocks(publish))

    def take_done(self) -> list[int]:
        """Return the holds whose blocks nobody here reads any more, each once."""
        with self._changed:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """End the thread; close the node before, so that nothing is waited for. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            if not isinstance(batch, list):
                self.boundary.call("hint", batch, miss=None)
                continue
            # of two requests with one prefix both may have computed it
            blocks = {
                (pages.group, h): block_id
                for publish in batch
                for pages in publish.pages
                for h, block_id in zip(pages.hashes, pages.ids, strict=True)
            }
            with about(*dict.fromkeys(publish.request_id for publish in batch)):
                n_published = self._publish(blocks)
            self._tally.count("prefix_blocks_published", n_published)
            self._tally.count("prefix_blocks_unpublished", len(blocks) - n_published)
            with self._changed:
                self._done += [publish.hold for publish in batch]

    def _take(self) -> list[Publish] | Callable[[], None] | None:
        """Return what to publish next, or a task whose turn it is; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            batch: list[Publish] = []
            n_blocks = 0
            while self._queue and n_blocks < _BATCH_BLOCKS:
                first = self._queue[0]
                if not isinstance(first, Publish):
                    return batch or self._pop_task()
                self._queue.popleft()
                batch.append(first)
                n_blocks += _n_blocks(first)
                self._n_queued -= _n_blocks(first)
            return batch or None

    def _pop_task(self) -> Callable[[], None]:
        task = self._queue.popleft()
        assert not isinstance(task, Publish)
        return task

    @guarded("publish", miss=0)
    def _publish(self, blocks: dict[tuple[int, bytes], int]) -> int:
        with self._changed:
            stream = self._stream
        n_published = 0
        for number, caches in enumerate(self._caches.groups):
            of_group = [(h, block_id) for (group, h), block_id in blocks.items() if group == number]
            if caches is not None and of_group:
                keys = [self._parts[number].key(h) for h, _ in of_group]
                if self._residents is not None:
                    blocks_of = [BlockName(number, bare(h)) for h, _ in of_group]
                    self._residents.name(keys, self._node.epoch, blocks_of)
                pieces = caches.pieces([block_id for _, block_id in of_group])
                n_published += int(self._node.publish(keys, pieces, stream=stream).sum())
        return n_published


def _n_blocks(publish: Publish) -> int:
    return sum(len(pages.ids) for pages in publish.pages)
