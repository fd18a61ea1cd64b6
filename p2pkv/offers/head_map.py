"""Unequal parallelism: which bytes of a page go from which prefill rank to which decode rank, by ranges of heads.

A rank of ``tp`` holds a range of the model's KV heads. Where there are more ranks than heads, ranks in a row hold
copies of one head, as serving engines lay them out. Rows are made with numpy, a batch of pages at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import UsageError
from p2pkv.offers.handles import RowSpans

LAYOUTS = ("token_major", "page_head")


@dataclass(frozen=True, slots=True)
class PageLayout:
    """How the KV heads of one page piece lie in memory: the K or the V of one layer, or whatever is paged alike."""

    order: str
    """``token_major``: ``[token][head][bytes]``; ``page_head``: ``[head][token][bytes]``."""
    n_heads: int
    """KV heads of the model, over all ranks."""
    head_nbytes: int
    """Of one head of one token."""
    page_tokens: int

    def __post_init__(self) -> None:
        if self.order not in LAYOUTS:
            raise UsageError(f"a page layout is one of {', '.join(LAYOUTS)}; not {self.order!r}")
        if min(self.n_heads, self.head_nbytes, self.page_tokens) < 1:
            raise UsageError("heads, their bytes and the tokens of a page must be above 0")


@dataclass(frozen=True, slots=True)
class HeadMap:
    """Maps the pieces of ``from_tp`` prefill ranks to those of ``to_tp`` decode ranks."""

    layout: PageLayout
    from_tp: int
    to_tp: int

    def __post_init__(self) -> None:
        for name, tp in (("from_tp", self.from_tp), ("to_tp", self.to_tp)):
            n_heads = self.layout.n_heads
            if tp < 1 or (n_heads % tp and tp % n_heads):
                raise UsageError(
                    f"{name} is {tp}: it must divide the {n_heads} heads or be a multiple of them"
                )

    def heads(self, rank: int, tp: int) -> tuple[int, int]:
        """Return the first head of a rank and the one after its last."""
        if not 0 <= rank < tp:
            raise UsageError(f"rank {rank} is not one of {tp}")
        n_heads = self.layout.n_heads
        if tp >= n_heads:
            head = rank * n_heads // tp
            return head, head + 1
        return rank * n_heads // tp, (rank + 1) * n_heads // tp

    def piece_nbytes(self, tp: int) -> int:
        """Return the size of one rank's page piece."""
        first, end = self.heads(0, tp)
        return (end - first) * self.layout.head_nbytes * self.layout.page_tokens

    def sources(self, to_rank: int) -> list[int]:
        """Return the prefill ranks a decode rank takes from, in the order of their heads; each head comes once."""
        first, end = self.heads(to_rank, self.to_tp)
        ranks: list[int] = []
        for head in range(first, end):
            holders = [r for r in range(self.from_tp) if self.heads(r, self.from_tp)[0] <= head]
            rank = holders[-1]
            if self.from_tp > self.layout.n_heads:
                # Copies of one head take turns, so that all of them serve; and where decode has copies as well, each
                # takes from the ranks in its own place, as serving engines pair them.
                copies = self.from_tp // self.layout.n_heads
                takers = self.to_tp // self.layout.n_heads
                turn = to_rank % takers * copies // takers if takers > 1 else to_rank % copies
                rank = head * copies + turn
            if not ranks or ranks[-1] != rank:
                ranks.append(rank)
        return ranks

    def destinations(self, from_rank: int) -> list[int]:
        """Return the decode ranks that take something from a prefill rank."""
        self.heads(from_rank, self.from_tp)
        return [rank for rank in range(self.to_tp) if from_rank in self.sources(rank)]

    @property
    def rows_per_page(self) -> int:
        """How many rows a page is for each pair of ranks."""
        return self.layout.page_tokens if self.layout.order == "token_major" else 1

    def first_row(self, from_rank: int, to_rank: int, n_pages: int) -> int:
        """Return where the rows of a prefill rank begin in the grant of a decode rank."""
        return self._place(from_rank, to_rank) * n_pages * self.rows_per_page

    def source_spans(self, from_rank: int, to_rank: int, pages: NDArray[np.int64]) -> RowSpans:
        """Return the rows that ``from_rank`` puts to ``to_rank``, page by page; ``(n * rows_per_page, 2)``.

        ``pages``: ``(n,)`` int64, the addresses of the pieces in the prefill rank's memory.
        """
        return self._spans(from_rank, self.from_tp, self._shared(from_rank, to_rank), pages)

    def destination_spans(self, to_rank: int, pages: NDArray[np.int64]) -> RowSpans:
        """Return the rows of a decode rank's grant: those from each of its :meth:`sources`, one source after the other.

        ``pages``: ``(n,)`` int64, the addresses of the pieces in the decode rank's memory.
        """
        parts = [
            self._spans(to_rank, self.to_tp, self._shared(source, to_rank), pages)
            for source in self.sources(to_rank)
        ]
        return np.concatenate(parts)

    def _place(self, from_rank: int, to_rank: int) -> int:
        sources = self.sources(to_rank)
        if from_rank not in sources:
            raise UsageError(
                f"rank {to_rank} of {self.to_tp} takes nothing from rank {from_rank} of {self.from_tp}"
            )
        return sources.index(from_rank)

    def _shared(self, from_rank: int, to_rank: int) -> tuple[int, int]:
        self._place(from_rank, to_rank)
        first, end = self.heads(from_rank, self.from_tp)
        to_first, to_end = self.heads(to_rank, self.to_tp)
        return max(first, to_first), min(end, to_end)

    def _spans(self, rank: int, tp: int, shared: tuple[int, int], pages: NDArray[np.int64]) -> RowSpans:
        if pages.dtype != np.int64 or pages.ndim != 1:
            raise UsageError(
                f"pages must be an (n,) int64 array of addresses, not {pages.shape} {pages.dtype}"
            )
        layout = self.layout
        first, end = self.heads(rank, tp)
        n_shared, skipped = shared[1] - shared[0], shared[0] - first
        if layout.order == "page_head":
            head = layout.page_tokens * layout.head_nbytes
            spans = np.empty((len(pages), 2), np.int64)
            spans[:, 0] = pages + skipped * head
            spans[:, 1] = n_shared * head
            return spans
        token = (end - first) * layout.head_nbytes
        starts = pages[:, None] + np.arange(layout.page_tokens, dtype=np.int64) * token
        spans = np.empty((starts.size, 2), np.int64)
        spans[:, 0] = starts.ravel() + skipped * layout.head_nbytes
        spans[:, 1] = n_shared * layout.head_nbytes
        return spans
