"""Pages whose every byte follows from their key, so that a reader can tell a wrong one from any other.

Those of half of the keys are bfloat16 numbers of few exponents, with some of any between them: nodes with
``compression`` keep these packed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from p2pkv import Node

_WORDS = (np.arange(1, (8 << 20) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)


_FLOATS = np.full(len(_WORDS), 0x3C00_3C00_3C00_3C00, np.uint64)
"""The exponents' bits that all numbers have; of every 64th word none."""
_FLOATS[::64] = 0
_VARIED = np.where(_FLOATS == 0, np.uint64(0xFFFF_FFFF_FFFF_FFFF), np.uint64(0x83FF_83FF_83FF_83FF))


def _salt(key: str) -> np.uint64:
    digest = zlib.crc32(key.encode()) | zlib.crc32(key.encode(), 0xFFFF) << 32
    return np.uint64(digest)


def _page(key: str, n_words: int) -> NDArray[np.uint64]:
    salt = _salt(key)
    words: NDArray[np.uint64] = _WORDS[:n_words] ^ salt
    if salt & np.uint64(1):
        words &= _VARIED[:n_words]
        words |= _FLOATS[:n_words]
    return words


def fill(pages: NDArray[Any], keys: Sequence[str]) -> None:
    """Write into row ``i`` the page of ``keys[i]``; rows are a multiple of 8 bytes."""
    for row, key in zip(pages, keys, strict=True):
        words = row.view(np.uint64)
        words[:] = _page(key, len(words))


def filled(keys: Sequence[str], nbytes: int) -> NDArray[np.uint8]:
    """Return the pages of ``keys``, a row of ``nbytes`` each."""
    rows = np.zeros((len(keys), nbytes), np.uint8)
    fill(rows, keys)
    return rows


def wrong(pages: NDArray[Any], keys: Sequence[str], hits: NDArray[np.uint8]) -> list[str]:
    """Return the keys of the hits whose bytes are not those of :func:`fill`."""
    bad = []
    for row, key, hit in zip(pages, keys, hits, strict=True):
        words = row.view(np.uint64)
        # np.array_equal would take an exception that a signal raises in it for a difference.
        if hit and (words != _page(key, len(words))).any():
            bad.append(key)
    return bad


def are_fetched(node: Node, keys: Sequence[str], nbytes: int, timeout: float) -> bool:
    """Whether a node gets every page of ``nbytes``; a wrong byte is an error at once."""
    rows = np.zeros((len(keys), nbytes), np.uint8)
    with node.register_memory(rows):
        outcomes = node.fetch(list(keys), rows, timeout=timeout)
    assert wrong(rows, keys, outcomes) == []
    return bool(outcomes.all())
