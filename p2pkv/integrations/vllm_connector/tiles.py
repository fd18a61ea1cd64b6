"""Where the heads of a rank's blocks lie: what it takes to hand over some of its heads, layers or tokens alone.

vLLM shows every attention layer's cache as ``[blocks, heads, tokens, content]``. A *tile* is one such block: all heads
of some tokens of one layer, head after head, and token after token within a head. One of vLLM's blocks is one tile, or
several where its kernel takes smaller ones. A *cell* is one token of one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Granules:
    """Tokens of a request in stretches of ``size``, which lie beside each other in every tile that they are of."""

    size: int
    first: int
    n: int

    @property
    def tokens(self) -> Numbers:
        """The first token of each."""
        return (self.first + np.arange(self.n, dtype=np.int64)) * self.size


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one group of layers in one rank's memory; immutable."""

    names: tuple[str, ...]
    """Of the layers; what follows has one entry for each."""
    bases: Numbers
    block_steps: Numbers
    """Bytes from one of vLLM's blocks to the next."""
    tile_steps: Numbers
    """Bytes from tile to tile within a block."""
    n_tiles: int
    """Of a block."""
    n_heads: int
    tile_tokens: int
    cell_nbytes: int
    dtype: str

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, Any]], n_blocks: int) -> Tiles | str:
        """Look at the caches of a group's layers, whose blocks are in one run; or say why they have no such tiles."""
        forms = {
            (*tensor.shape[1:], str(tensor.dtype), tensor.element_size(), len(tensor) // n_blocks)
            for _, tensor in tensors
        }
        if len(forms) > 1:
            return "its layers keep blocks of several forms"
        form = next(iter(forms))
        if len(form) != 6:
            return f"its blocks are not of heads, tokens and content, but {form[:-3]}"
        if not all(tensor[0].is_contiguous() for _, tensor in tensors):
            return "its blocks are not head after head; start vLLM with VLLM_KV_CACHE_LAYOUT=HND"
        n_heads, tile_tokens, width, dtype, item_nbytes, n_tiles = form
        steps = np.array([tensor.stride(0) * item_nbytes for _, tensor in tensors], np.int64)
        return cls(
            tuple(name for name, _ in tensors),
            np.array([tensor.data_ptr() for _, tensor in tensors], np.int64),
            steps * n_tiles,
            steps,
            n_tiles,
            n_heads,
            tile_tokens,
            width * item_nbytes,
            dtype.removeprefix("torch."),
        )

    @property
    def block_tokens(self) -> int:
        """Tokens of one of vLLM's blocks."""
        return self.n_tiles * self.tile_tokens

    def owners(self, granules: Granules, first_block: int, block_ids: Sequence[int]) -> Numbers:
        """Return the block of each granule; ``block_ids`` are the request's from number ``first_block`` on.

        Raises IndexError for a granule of none of them.
        """
        numbers = granules.tokens // self.block_tokens - first_block
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < len(block_ids):
            raise IndexError(
                f"blocks {numbers[0]} to {numbers[-1]} of a request of which {len(block_ids)} are here"
            )
        return np.asarray(block_ids, np.int64)[numbers]

    def rows(
        self, layers: Sequence[int], heads: range, granules: Granules, owners: Numbers, *, is_by_head: bool
    ) -> NDArray[np.int64]:
        """Return the ``(n, 2)`` addresses and lengths of some heads of some layers: granule, then layer, then head.

        ``layers`` are numbers of :attr:`names`, ``heads`` those of this rank. All heads of a layer's granule are one
        row, which takes whole tiles, unless ``is_by_head``.
        """
        within = granules.tokens % self.block_tokens
        chosen = np.asarray(layers, np.int64)
        starts = (
            self.bases[chosen]
            + owners[:, None] * self.block_steps[chosen]
            + (within // self.tile_tokens)[:, None] * self.tile_steps[chosen]
            + (within % self.tile_tokens)[:, None] * self.cell_nbytes
        )
        head_nbytes = self.tile_tokens * self.cell_nbytes
        firsts = np.asarray(heads if is_by_head else heads[:1], np.int64)
        rows = np.empty((*starts.shape, len(firsts), 2), np.int64)
        rows[..., 0] = starts[..., None] + firsts * head_nbytes
        rows[..., 1] = granules.size * self.cell_nbytes * (1 if is_by_head else len(heads))
        return rows.reshape(-1, 2)
