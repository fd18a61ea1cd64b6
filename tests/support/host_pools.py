"""SGLang's host pools as numpy has them: the shapes, the pointer tables and the flat pages of SGLang 0.5.23."""

from __future__ import annotations

from typing import Any

import numpy as np

LAYERS, HEADS, WIDTH = 4, 4, 32

MHA = ["layer_first", "page_first", "page_first_direct", "page_head"]
MLA = ["layer_first", "page_first", "page_first_direct"]


class TensorFake:
    """The part of a torch tensor that tells where its memory is."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype
        self.shape = array.shape

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)


class HostPoolFake:
    """``n_pages`` pages; ``kind`` is mha, mla or mixed (K and V of different widths, in two buffers)."""

    def __init__(
        self,
        layout: str = "page_first",
        *,
        kind: str = "mha",
        n_pages: int = 16,
        page_size: int = 16,
        dtype: str = "float16",
        heads: int = HEADS,
    ) -> None:
        self.layout, self.page_size, self.dtype = layout, page_size, np.dtype(dtype)
        self.kind, self.n_pages = kind, n_pages
        if kind == "mixed":
            self.arrays = [self._make([], heads, WIDTH), self._make([], heads, WIDTH // 2)]
            self.kv_buffer: Any = tuple(TensorFake(array) for array in self.arrays)
        else:
            lead, heads = ([2], heads) if kind == "mha" else ([], 1)
            self.arrays = [self._make(lead, heads, WIDTH)]
            self.kv_buffer = TensorFake(self.arrays[0])

    def _make(self, lead: list[int], heads: int, width: int) -> np.ndarray:
        size = self.n_pages * self.page_size
        shape = {
            "layer_first": [LAYERS, size, heads, width],
            "page_first": [size, LAYERS, heads, width],
            "page_first_direct": [self.n_pages, LAYERS, self.page_size, heads, width],
            "page_head": [self.n_pages, heads, self.page_size, LAYERS, width],
        }[self.layout]
        return np.zeros(lead + shape, self.dtype)

    def _pieces(self, page: int) -> list[np.ndarray]:
        """Return the pieces of a page in SGLang's order; of layers that lie apart K and V in turn."""
        tokens = slice(page * self.page_size, (page + 1) * self.page_size)
        halves = [half for array in self.arrays for half in (array if self.kind == "mha" else [array])]
        if self.layout == "layer_first":
            return [half[layer, tokens] for layer in range(LAYERS) for half in halves]
        if self.layout == "page_first":
            return [half[tokens] for half in halves]
        return [half[page] for half in halves]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        first_tokens = indices.tolist()[:: self.page_size]
        pieces = [p for token in first_tokens for p in self._pieces(token // self.page_size)]
        return [int(p.ctypes.data) for p in pieces], [p.nbytes for p in pieces]

    def get_split_heads_page_buffer_meta(
        self, indices: Any, split_factor: int
    ) -> tuple[list[int], list[int]]:
        assert self.layout == "page_head"
        assert len(indices) % self.page_size == 0
        assert self.arrays[0].shape[2] % split_factor == 0, "heads don't divide"
        pages = [token // self.page_size for token in indices.tolist()[:: self.page_size]]
        pieces = [
            shares[share]
            for page in pages
            for share in range(split_factor)
            for shares in [np.split(half, split_factor) for half in self._pieces(page)]
        ]
        return [int(p.ctypes.data) for p in pieces], [p.nbytes for p in pieces]

    def flat_page(self, page: int) -> np.ndarray:
        """Return a copy of a page in the order of SGLang's ``get_data_page(flat=True)``."""
        assert len(self.arrays) == 1, "SGLang has no flat pages of such pools"
        tokens = slice(page * self.page_size, (page + 1) * self.page_size)
        array = self.arrays[0]
        lead = (slice(None),) if self.kind == "mha" else ()
        where = {"layer_first": (slice(None), tokens), "page_first": (tokens,)}.get(self.layout, (page,))
        return np.ascontiguousarray(array[lead + where]).reshape(-1)

    def content(self, page: int) -> bytes:
        return b"".join(piece.tobytes() for piece in self._pieces(page))

    def fill(self, page: int, seed: int) -> None:
        """Fill a page with bytes that only ``seed`` has."""
        random = np.random.default_rng(seed)
        for piece in self._pieces(page):
            piece[:] = random.integers(-128, 128, piece.shape).astype(self.dtype)

    def indices(self, *pages: int) -> np.ndarray:
        """Return the token indices of pages, one after another."""
        return np.concatenate([np.arange(self.page_size) + page * self.page_size for page in pages])
