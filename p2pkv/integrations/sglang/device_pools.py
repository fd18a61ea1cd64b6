"""SGLang's device pools as p2pkv sees them: where pages lie, how long they are, and how their keys begin.

A device pool has a tensor for each layer's K and for each layer's V, so a page is as many pieces; it is stored as one
entry. Taken in this order, K of all layers and then V, its bytes are those of HiCache's layout ``page_first_direct``.
So a plain pool's keys begin as those of such host pools do, and the pages are found from both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import UsageError
from p2pkv.integrations.ranges import storages
from p2pkv.integrations.sglang.keys import KeyPrefix
from p2pkv.integrations.sglang.pools import SHARDED_SIDE_POOLS, Indices
from p2pkv.integrations.sglang.settings import Rank
from p2pkv.integrations.sglang.weights import Weights
from p2pkv.page import Pieces

_SHARED_LAYOUT = "page_first_direct"


class DeviceEntry(Protocol):
    """The part of SGLang's ``DevicePoolEntry`` that is relied on."""

    page_size: int
    buffer_meta: Sequence[Sequence[tuple[int, int, int]]]
    """Of every tensor, in the order of a page's pieces: address, bytes from row to row, bytes of a page."""

    def get_hybrid_pool_buffer(self) -> Sequence[Any]:
        """Return the tensors."""

    def prepare_locations(self, indices: Indices) -> Sequence[int]:
        """Return the first row of every page. Raises ValueError unless each is whole and lies in the pool."""


class DevicePool:
    """One device pool; immutable. ``page_nbytes`` is the length of a page."""

    def __init__(
        self,
        entry: DeviceEntry,
        name: str,
        rank: Rank,
        weights: Weights,
        *,
        halves: int = 0,
    ) -> None:
        """Look at ``entry``. ``halves`` is 2 of a plain pool of K and V, 1 of a plain MLA pool, and 0 of any other."""
        self._entry = entry
        self.page_size = entry.page_size
        tensors = [tensor for component in entry.buffer_meta for tensor in component]
        self._bases, self._strides, self._lengths = np.array(tensors, np.int64).reshape(-1, 3).T
        self.page_nbytes = int(self._lengths.sum())
        self.ranges = storages(entry.get_hybrid_pool_buffer())
        self.prefix = KeyPrefix(
            self._kind(name, halves),
            rank,
            weights,
            is_shared=rank.is_replicated and name not in SHARDED_SIDE_POOLS,
        )

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """Return the keys of pages of this pool, of the weights as they are now."""
        return self.prefix.keys(hashes)

    def pieces(self, n_pages: int, indices: Indices | None) -> Pieces:
        """Return where ``n_pages`` pages lie, whose tokens are ``indices``; nothing of those is kept."""
        rows = np.array([] if indices is None else self._entry.prepare_locations(indices), np.int64)
        if len(rows) != n_pages:
            raise UsageError(f"{n_pages} pages, but indices of {len(rows)}")
        pieces = np.empty((n_pages, len(self._bases), 2), np.int64)
        pieces[:, :, 0] = self._bases + rows[:, None] * self._strides
        pieces[:, :, 1] = self._lengths
        return Pieces(pieces)

    def _kind(self, name: str, halves: int) -> str:
        dtype = self._entry.get_hybrid_pool_buffer()[0].dtype
        if halves:
            lengths: NDArray[np.int64] = self._lengths.reshape(halves, -1).sum(axis=1)
            return f"{name} {_SHARED_LAYOUT} {dtype} page={self.page_size} pieces={lengths.tolist()}"
        return f"{name} of a device {dtype} page={self.page_size} pieces={self._lengths.tolist()}"
