"""Bytes that say which page, and which version of it, they are; so any other byte is seen.

A row's first word is the version, the others follow from name and version. A row that is torn, belongs to another
page, or holds anything else is no version of the name it was read under.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NBYTES = 8192
"""Of a page, and of a row of a transfer: two granules, so that blocks split and merge."""

Rows = NDArray[np.uint8]
"""``(n, NBYTES)``."""

NO_VERSION = -1

_BASE = np.random.default_rng(7).integers(0, 1 << 63, size=NBYTES // 8, dtype=np.uint64)


def rows_of(n: int) -> Rows:
    """Return memory for ``n`` rows, all of it touched."""
    return np.full((n, NBYTES), 0xEE, np.uint8)


def fill(rows: Rows, names: Sequence[str], versions: Sequence[int]) -> None:
    """Write into row ``i`` the bytes of ``names[i]`` in ``versions[i]``."""
    for row, name, version in zip(rows, names, versions, strict=True):
        words = row.view(np.uint64)
        np.bitwise_xor(_BASE, _mark(name, version), out=words)
        words[0] = version


def version_of(row: Rows, name: str) -> int:
    """Return which version of ``name`` the row is, ``NO_VERSION`` if any byte is of none."""
    words = row.view(np.uint64)
    version = int(words[0])
    if np.array_equal(words[1:], _BASE[1:] ^ _mark(name, version)):
        return version
    return NO_VERSION


class Guarded:
    """Memory that calls write to, and that nothing may write to between them."""

    def __init__(self, n: int) -> None:
        self.rows = rows_of(n)
        self._pattern = 0xEE

    def is_untouched(self) -> bool:
        """Whether every byte is still what :meth:`seal` left."""
        return bool((self.rows == self._pattern).all())

    def seal(self) -> None:
        """Overwrite all of it; a write that comes after the end of a call is seen in this."""
        self._pattern = 0xA5 if self._pattern == 0xEE else 0xEE
        self.rows[:] = self._pattern


def _mark(name: str, version: int) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{name}#{version}".encode(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint64)
