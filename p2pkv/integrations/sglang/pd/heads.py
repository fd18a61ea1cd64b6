"""KV between prefill and decode servers that share a model's heads among other numbers of ranks.

A decode rank takes a range of heads: a part of one prefill rank's, or those of several. Its rows are numbered source by
source, in the order of their heads, then as always: page by page, in each page buffer by buffer, and then token by
token, because the heads of a rank lie beside each other within a token. What comes behind the pages the first source
sends. Which ranks that are is SGLang's own mapping (``CommonKVManager._resolve_rank_mapping``), of which
:class:`p2pkv.transfers.HeadMap` asks a part only where copies of a head are asked as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from p2pkv.integrations.sglang.pd.rows import Buffers, Items, KVArgs, Shape, Spans
from p2pkv.transfers import HeadMap, PageLayout

Addresses = NDArray[np.int64]


class Split(msgspec.Struct, frozen=True):
    """How one server's ranks share the heads of the KV cache, and which of them this is."""

    size: int = 1
    """Attention tensor parallel size."""
    rank: int = 0
    n_heads: int = 0
    """KV heads of the model, over all ranks; 0 where every rank has all of the KV, or where nobody says."""
    page_tokens: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or self.n_heads < 0 or self.page_tokens < 1:
            raise ValueError(f"impossible split of heads: {self}")

    @classmethod
    def of(cls, args: KVArgs, size: int, rank: int, *, is_mla: bool, n_heads: int = 0) -> Split:
        """Take what SGLang says of a rank; ``n_heads`` where it says nothing of heads, as to decode."""
        told: Any = getattr(args, "total_kv_head_num", None)
        n_heads = told or n_heads
        if is_mla or getattr(args, "num_draft_entries", None):  # nobody says how many heads a draft has
            n_heads = 0
        return cls(size, rank, n_heads, getattr(args, "page_size", None) or 1)

    @property
    def n_heads_here(self) -> int:
        """Heads of one rank."""
        return max(1, self.n_heads // self.size)

    def is_apart_from(self, other: Split) -> bool:
        """Whether the two servers' ranks hold different ranges of heads."""
        return self.n_heads > 0 and self.size != other.size

    def of_a_head(self, item_nbytes: Sequence[int]) -> tuple[int, ...] | None:
        """Return the bytes that each buffer has of a head of a token, or None if an item is no whole number of them."""
        unit = self.n_heads_here * self.page_tokens
        return None if any(n % unit for n in item_nbytes) else tuple(n // unit for n in item_nbytes)

    def difference(self, other: Split) -> str | None:
        """Say in one sentence why heads can't be taken from one server's ranks for the other's, or None."""
        if not self.is_apart_from(other):
            return None
        if (self.n_heads, self.page_tokens) != (other.n_heads, other.page_tokens):
            mine, theirs = (f"{s.n_heads} heads and pages of {s.page_tokens} tokens" for s in (self, other))
            return f"there are {mine} here, {theirs} there"
        for size in (self.size, other.size):
            if self.n_heads % size and size % self.n_heads:
                return f"{self.n_heads} heads can't be shared among {size} ranks evenly"
        if self.size % other.size and other.size % self.size:
            return f"SGLang pairs {self.size} ranks with {other.size} only if one is a multiple of the other"
        return None


def difference(mine: Shape, split: Split, other: Shape, other_split: Split) -> str | None:
    """Say in one sentence why rows of the two servers can't be paired, or None."""
    reason = split.difference(other_split)
    if reason is not None or not split.is_apart_from(other_split):
        return reason or mine.difference(other)
    apart = f"the heads are shared among {split.size} ranks here and {other_split.size} there"
    if mine.states or other.states:
        return f"{apart}, and states can't be shared out anew"
    if len(mine.pages) < 2:
        return f"{apart}, and the KV lies in one buffer, which says nothing of where heads are"
    heads, other_heads = split.of_a_head(mine.pages), other_split.of_a_head(other.pages)
    if heads is None or other_heads is None:
        return f"pages are no {split.n_heads_here} heads of {split.page_tokens} tokens each, but {mine.pages[:1]} bytes"
    return msgspec.structs.replace(mine, pages=heads).difference(
        msgspec.structs.replace(other, pages=other_heads)
    )


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of pages between one prefill and one decode rank. Both servers number them alike."""

    buffers: Buffers
    """Those of this side."""
    prefill: Split
    decode: Split

    @property
    def sources(self) -> list[int]:
        """Prefill ranks that the decode rank takes from, in the order of their rows."""
        return self._map(1).sources(self.decode.rank)

    @property
    def place(self) -> int | None:
        """Which of the sources the prefill rank is, or None: another one has the same heads."""
        sources = self.sources
        return sources.index(self.prefill.rank) if self.prefill.rank in sources else None

    def n_rows(self, n_pages: int) -> int:
        """Return how many rows so many pages are, of each source."""
        return n_pages * len(self.buffers.addresses) * self._map(1).rows_per_page

    def outgoing(self, pages: Items) -> Spans:
        """Return the rows of ``pages`` in the prefill rank's memory."""
        mine, theirs = self.prefill.rank, self.decode.rank
        return self._rows(pages, self.prefill, 1, lambda heads, at: heads.source_spans(mine, theirs, at))

    def incoming(self, pages: Items) -> Spans:
        """Return the rows of ``pages`` in the decode rank's memory, from all sources."""
        mine, n = self.decode.rank, len(self.sources)
        return self._rows(pages, self.decode, n, lambda heads, at: heads.destination_spans(mine, at))

    def _map(self, head_nbytes: int) -> HeadMap:
        split = self.decode
        layout = PageLayout("token_major", split.n_heads, head_nbytes, split.page_tokens)
        return HeadMap(layout, self.prefill.size, split.size)

    def _rows(
        self, pages: Items, own: Split, n_sources: int, spans_of: Callable[[HeadMap, Addresses], Spans]
    ) -> Spans:
        places = self.buffers.places(pages)
        parts = []
        for buffer, item_nbytes in enumerate(self.buffers.item_nbytes):
            heads = self._map(int(item_nbytes) // (own.n_heads_here * own.page_tokens))
            spans = spans_of(heads, np.ascontiguousarray(places[:, buffer]))
            parts.append(spans.reshape(n_sources, len(places), heads.rows_per_page, 2))
        if not parts:
            return np.zeros((0, 2), np.int64)
        return np.stack(parts, axis=2).reshape(-1, 2)
