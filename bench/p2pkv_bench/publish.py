"""Publish into a full pool: each page evicts another one, and its entry goes to the other process's shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count

import numpy as np

from p2pkv.node import Node
from p2pkv_bench import references
from p2pkv_bench.errors import BenchError
from p2pkv_bench.keys import keys_at
from p2pkv_bench.pair import OWNER, Memories, Pair
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import Call, Contestant, take_turns, timed
from p2pkv_bench.rows import KIB, MIB, Row, Target, make_row
from p2pkv_bench.working_set import Rotation, checksums

POOL_NBYTES = 256 * MIB
ROUND_NBYTES = 96 * MIB
"""At most this is published in one round, so that all of it is still there to be verified afterwards."""


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure every case of the plan; the transport takes no part in it."""
    with Pair(meeting, plan.transports[0], plan.working_set, reader_pool=POOL_NBYTES) as pair:
        for page_nbytes in plan.pages:
            for batch in plan.batches:
                for threads in plan.threads:
                    if page_nbytes * batch * threads <= ROUND_NBYTES:
                        plan.tell(f"publish, {page_nbytes // KIB} KiB, {batch} a call, {threads} threads")
                        yield Case(pair, plan, page_nbytes, batch, threads).row()


class Case:
    """One size of pages and batches, published at ``node``: the pair's reader unless told otherwise.

    The entries of their keys lie at ``shard``.
    """

    _serial = count()

    def __init__(
        self,
        pair: Memories,
        plan: Plan,
        page_nbytes: int,
        batch: int,
        threads: int,
        *,
        node: Node | None = None,
        shard: str = OWNER,
        timing: Callable[[Sequence[Sequence[Call]]], float] = timed,
    ) -> None:
        self._pair = pair
        self._node = node or pair.node
        self._shard = shard
        self._plan = plan
        self._page_nbytes = page_nbytes
        self._batch = batch
        self._threads = threads
        self._timing = timing
        self._pages = pair.source.pages(page_nbytes)
        self._expected = pair.source.checksums(page_nbytes)
        self._rotation = Rotation(len(self._pages))
        self._slots = pair.destination.slots(page_nbytes)
        self._slot_rotation = Rotation(len(self._slots))
        most = max(1, ROUND_NBYTES // (page_nbytes * batch * threads))
        self._n_calls = min(plan.n_calls(page_nbytes, batch, threads), most)

    def row(self) -> Row:
        """Compare with copies."""
        self.fill()
        contestants: dict[str, Contestant] = {
            "p2pkv": self.publish,
            references.MEMCPY: partial(self.copy, is_chosen=False),
            references.CHOSEN_COPY: partial(self.copy, is_chosen=True),
        }
        is_judged = self._page_nbytes >= 64 * KIB and self._batch >= 32 and self._threads == 1
        return make_row(
            take_turns(contestants, self._plan.rounds),
            suite="publish",
            case="into a full pool",
            unit="GB/s",
            page_nbytes=self._page_nbytes,
            batch=self._batch,
            threads=self._threads,
            target=Target(self._least_of_memcpy(), references.MEMCPY) if is_judged else None,
        )

    def _least_of_memcpy(self) -> float:
        return 0.85 if self._batch * self._page_nbytes >= 32 * MIB else 0.7

    def fill(self) -> None:
        """Fill the pool with pages of this size, so that each further one evicts exactly one."""
        n_pages = POOL_NBYTES // self._page_nbytes
        keys = self._keys(n_pages)
        step = max(1, min(1024, 8 * MIB // self._page_nbytes))
        for first in range(0, n_pages, step):
            part = keys[first : first + step]
            page = self._rotation.take(len(part))
            self._node.publish(part, self._pages[page : page + len(part)])

    def _keys(self, n: int) -> list[str]:
        return keys_at(self._node, self._shard, f"publish-{next(self._serial)}", n)

    def publish(self) -> float:
        """Publish a round; return GB/s."""
        n = self._n_calls * self._batch
        keys = self._keys(n * self._threads)
        calls = [
            (keys[i : i + self._batch], self._rotation.take(self._batch))
            for i in range(0, len(keys), self._batch)
        ]
        parts = [calls[i :: self._threads] for i in range(self._threads)]
        seconds = self._timing([[partial(self._publish_one, *call) for call in part] for part in parts])
        self._verify(calls)
        return len(keys) * self._page_nbytes / seconds / 1e9

    def _publish_one(self, keys: list[str], page: int) -> None:
        if not self._node.publish(keys, self._pages[page : page + self._batch]).all():
            raise BenchError("pages were not published")

    def _verify(self, calls: Sequence[tuple[list[str], int]]) -> None:
        """Fetch from this node's own pool all that was published."""
        for keys, page in calls:
            rows = self._slots[: self._batch]
            rows[:, :8] = 0
            outcomes = self._node.fetch(keys, rows)
            expected = self._expected[page : page + self._batch]
            if not outcomes.all() or not np.array_equal(checksums(rows), expected):
                raise BenchError("the pool does not hold what was published")

    def copy(self, *, is_chosen: bool) -> float:
        """Copy as much; return GB/s."""
        seconds = self._timing(
            [
                [self._next_copy(is_chosen=is_chosen) for _ in range(self._n_calls)]
                for _ in range(self._threads)
            ]
        )
        return self._threads * self._n_calls * self._batch * self._page_nbytes / seconds / 1e9

    def _next_copy(self, *, is_chosen: bool) -> Call:
        slot = self._slot_rotation.take(self._batch)
        rows = self._slots[slot : slot + self._batch]
        return references.copy(self._pages, self._rotation.take(self._batch), rows, is_chosen=is_chosen)
