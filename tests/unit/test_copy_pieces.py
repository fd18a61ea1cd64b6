"""Copies of pieces that lie anywhere, many in one call."""

from __future__ import annotations

import numpy as np
import pytest

from p2pkv import _native

SIZES = (0, 1, 63, 4096, 16 * 1024, 64 * 1024 + 5)
"""Below and above where copies go past the cache."""


def test_each_piece_arrives_where_it_should_and_nothing_beside_it() -> None:
    sources = [np.random.default_rng(i).integers(0, 256, nbytes, np.uint8) for i, nbytes in enumerate(SIZES)]
    targets = [np.zeros(nbytes + 2, np.uint8) for nbytes in SIZES]
    pairs = zip(targets, sources, strict=True)
    copies = np.array([[to.ctypes.data + 1, of.ctypes.data, len(of)] for to, of in pairs], np.int64)
    _native.copy_pieces(copies)
    for target, source in zip(targets, sources, strict=True):
        assert target.tobytes() == b"\0" + source.tobytes() + b"\0"


def test_no_copies_are_none() -> None:
    _native.copy_pieces(np.empty((0, 3), np.int64))


def test_a_negative_length_is_refused_before_anything_is_copied() -> None:
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    row = [target.ctypes.data, source.ctypes.data]
    with pytest.raises(ValueError, match="negative lengths"):
        _native.copy_pieces(np.array([[*row, 8], [*row, -1]], np.int64))
    assert not target.any()


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"copies must be a C-contiguous int64 array of shape \(n, 3\)"):
        _native.copy_pieces(np.zeros((2, 2), np.int64))
