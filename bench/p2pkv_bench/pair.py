"""Two nodes in two processes, one with pages and one that wants them, and the memory on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from p2pkv.node import Node
from p2pkv.transports.base import Transport
from p2pkv_bench.errors import BenchError
from p2pkv_bench.holding import Holding
from p2pkv_bench.keys import keys_at
from p2pkv_bench.peer import Meeting, Peer
from p2pkv_bench.rows import MIB
from p2pkv_bench.working_set import Destination, Rotation, Source, checksums

READER = "reader"
OWNER = "owner"


class Memories(Protocol):
    """A node of this process, and where pages come from and go to."""

    node: Node
    source: Source
    destination: Destination


class Pair(Holding):
    """The reader is here, the owner in the other process; so is the shard that has the directory entries."""

    def __init__(
        self,
        meeting: Meeting,
        transport: str,
        working_set: int,
        reader_pool: int = 16 * MIB,
        *,
        readable: bool = False,
    ) -> None:
        with ExitStack() as undo:
            self._meeting = meeting
            self.transport = transport
            self._readable = readable
            self.owner = undo.enter_context(Peer())
            # Room for the pages of two sizes and a half: where a pool has to sweep the place of an earlier size, a few
            # of this one's pages that lie there go as well.
            pool_size = working_set * 5 // 2 + MIB
            settings = meeting.settings(OWNER, transports=[transport], pool_size=pool_size)
            self.owner.call("start", config=settings, working_set=working_set, readable=readable)
            self.source = Source(working_set)
            self.destination = Destination(working_set)
            self.node = undo.enter_context(self.reader(READER, (), pool_size=reader_pool))
            self.owner.call("wait_for", n_members=2)
            self._undo = undo.pop_all()

    def reader(
        self,
        node_id: str,
        extra: Sequence[Transport],
        pool_size: int = 16 * MIB,
        disk: Mapping[str, object] | None = None,
    ) -> Node:
        """Start one more node in this process, with the same memory registered; the caller closes it."""
        names = ["local"] if extra else [self.transport]
        node = self._meeting.start(
            node_id, extra=extra, transports=names, pool_size=pool_size, **(disk or {})
        )
        self.source.register(node, readable=self._readable)
        node.register_memory(self.destination.array)
        return node


class Pages:
    """All pages of one size at the owner, at most ``most``, and where they are brought to."""

    def __init__(self, pair: Pair, page_nbytes: int, *, publish: bool = True, most: int = 0) -> None:
        self.nbytes = page_nbytes
        self.expected = pair.source.checksums(page_nbytes)[: most or None]
        self.n_pages = len(self.expected)
        self.slots = pair.destination.slots(page_nbytes)
        self.keys = keys_at(pair.node, OWNER, f"{pair.transport}-{page_nbytes}", self.n_pages)
        self._page_rotation = Rotation(self.n_pages)
        self._slot_rotation = Rotation(len(self.slots))
        if publish:
            prefix = f"{pair.transport}-{page_nbytes}"
            n_published = pair.owner.call(
                "publish", page_nbytes=page_nbytes, prefix=prefix, shard=OWNER, n_pages=self.n_pages
            )
            if n_published != self.n_pages:
                raise BenchError(
                    f"only {n_published} of {self.n_pages} pages of {page_nbytes} bytes found room"
                )

    def next_moves(self, n_calls: int, batch: int) -> list[Move]:
        """Return the next calls: pages not read for longest, to where nothing was written for longest."""
        return [
            Move(self, self._page_rotation.take(batch), self._slot_rotation.take(batch), batch)
            for _ in range(n_calls)
        ]

    def verify(self, moves: Sequence[Move]) -> None:
        """Raise if any byte of the moves is not what it must be."""
        for move in moves:
            if not np.array_equal(checksums(move.rows), self.expected[move.page : move.page + move.batch]):
                raise BenchError(f"wrong bytes in pages {move.page} to {move.page + move.batch - 1}")


class Move:
    """One call's pages."""

    def __init__(self, pages: Pages, page: int, slot: int, batch: int) -> None:
        self.page = page
        self.batch = batch
        self.keys = pages.keys[page : page + batch]
        self.rows = pages.slots[slot : slot + batch]
        spans = np.empty((batch, 3), np.int64)
        spans[:, 0] = (slot + np.arange(batch)) * pages.nbytes
        spans[:, 1] = (page + np.arange(batch)) * pages.nbytes
        spans[:, 2] = pages.nbytes
        self.spans: NDArray[np.int64] = spans
        """From the source to the destination; both hold the pages one after another."""


def spans_of(moves: Sequence[Move]) -> NDArray[np.int64]:
    """Return the spans of all moves, in order."""
    return np.concatenate([move.spans for move in moves])
