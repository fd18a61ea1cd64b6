"""The paged KV cache of one engine, and the names of its pages.

Laid out as serving engines do: K and V are two arrays, so a page is two pieces of memory that lie far apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Spans = NDArray[np.int64]
"""``(n_pages, n_pieces, 2)``: absolute address and bytes of every piece of every page."""


class OutOfPagesError(RuntimeError):
    """The cache has fewer free pages than a request needs."""


class PagedKV:
    """``n_pages`` pages of keys and values, lent to sequences. One thread at a time.

    A page that nobody holds is all NaN: a page that is used without being computed or fetched first spoils
    the output for all to see, instead of leaving in it what an earlier sequence happened to write there.
    """

    def __init__(self, n_pages: int, page_shape: tuple[int, int, int]) -> None:
        """Allocate the cache; ``page_shape`` is (layers, tokens a page, width)."""
        self.k: Floats = np.full((n_pages, *page_shape), np.nan, dtype=np.float32)
        self.v: Floats = np.full((n_pages, *page_shape), np.nan, dtype=np.float32)
        self._free = list(range(n_pages))

    @property
    def n_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, n_pages: int) -> list[int]:
        """Lend ``n_pages`` pages, to be given back with :meth:`give_back`."""
        if n_pages > len(self._free):
            raise OutOfPagesError(
                f"the sequence needs {n_pages} pages; {len(self._free)} of {len(self.k)} are free"
            )
        return [self._free.pop() for _ in range(n_pages)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Take back pages that a sequence no longer needs."""
        self.k[pages] = np.nan
        self.v[pages] = np.nan
        self._free.extend(pages)

    def spans(self, pages: Sequence[int]) -> Spans:
        """Say where the pages lie: two pieces each, K and V."""
        spans = np.empty((len(pages), 2, 2), dtype=np.int64)
        for piece, array in enumerate((self.k, self.v)):
            spans[:, piece, 0] = array.ctypes.data + np.asarray(pages, dtype=np.int64) * array.strides[0]
            spans[:, piece, 1] = array.strides[0]
        return spans


def page_keys(tokens: Sequence[int], page: int) -> list[str]:
    """Name the full pages of a sequence: a page's key covers its tokens and all before them.

    Two prompts share a key exactly as far as they share whole pages from the beginning.
    """
    keys: list[str] = []
    digest = b""
    for first in range(0, len(tokens) - page + 1, page):
        block = np.asarray(tokens[first : first + page], dtype="<u4").tobytes()
        digest = hashlib.sha256(digest + block).digest()
        keys.append(digest.hex())
    return keys
