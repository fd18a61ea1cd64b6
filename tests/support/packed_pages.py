"""The packed form of pages, read in plain numpy as docs/codec.md says: what the native codec is compared with."""

from __future__ import annotations

import ctypes

import numpy as np

from p2pkv.page import Locations
from p2pkv.pool import Pool

BLOCK = 4096
UNIT = 64
_VALUES = BLOCK // 2


def stored(pool: Pool, locations: Locations, i: int = 0) -> bytes:
    """Return the bytes of a page as they lie in the pool."""
    location = locations[i]
    nbytes = int(location["flags"] >> 4) * UNIT or int(location["length"])
    return ctypes.string_at(pool.address + int(location["offset"]), nbytes)


def unpack(packed: bytes) -> bytes:
    """Return the page; raise if anything is not as the table says."""
    assert packed[:8] == b"p2kc\1\0\0\0"
    length = int.from_bytes(packed[8:16], "little")
    n_blocks = -(-length // BLOCK)
    table = np.frombuffer(packed, [("layout", "u1"), ("base", "u1"), ("escapes", "<u2")], n_blocks, 16)
    sizes = [_nbytes(entry, min(BLOCK, length - i * BLOCK)) for i, entry in enumerate(table)]
    at = len(packed) - sum(sizes)
    padding = packed[16 + 4 * n_blocks : at]
    assert len(packed) % UNIT == 0
    assert len(padding) < UNIT
    assert not any(padding)
    page = b""
    for entry, nbytes in zip(table, sizes, strict=True):
        page += _unpack_block(entry, packed[at : at + nbytes])
        at += nbytes
    assert len(page) == length
    return page


def _nbytes(entry: np.void, raw: int) -> int:
    if entry["layout"] == 0:
        return raw
    assert raw == BLOCK
    return {1: 3072, 2: 3584}[int(entry["layout"])] + 3 * int(entry["escapes"])


def _unpack_block(entry: np.void, data: bytes) -> bytes:
    layout, base, n = int(entry["layout"]), int(entry["base"]), int(entry["escapes"])
    if layout == 0:
        assert (base, n) == (0, 0)
        return data
    rows = np.frombuffer(data[: len(data) - 3 * n], np.uint8).astype(np.uint16)
    first, fours = rows[:_VALUES], rows[_VALUES : _VALUES * 3 // 2]
    four = np.concatenate([fours & 15, fours >> 4])
    if layout == 1:
        exponents, zero, shift = (four + base) & 0xFF, four == 15, 7
        rest = (first & 0x80) << 8 | first & 0x7F
    else:
        twos = rows[_VALUES * 3 // 2 :]
        upper = four | np.concatenate([twos >> 2 * i & 3 for i in range(4)]) << 4
        exponents, zero, shift = (upper & 7) + base & 0x1F, upper & 7 == 7, 10
        rest = (upper >> 5) << 15 | (upper >> 3 & 3) << 8 | first
    exponents = np.where(zero, 0, exponents).astype(np.uint16)
    places = np.frombuffer(data[len(data) - 3 * n : len(data) - n], "<u2")
    exponents[places] = np.frombuffer(data[len(data) - n :], np.uint8)
    return (rest | exponents << shift).astype("<u2").tobytes()
