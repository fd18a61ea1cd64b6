"""The checksum against an implementation of docs/checksum.md that shares nothing with the native one."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from p2pkv import _native

DOC = Path(__file__).resolve().parents[2] / "docs" / "checksum.md"
STARTS = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A)
MASK = 2**64 - 1


def crc32c_of_byte(lane: int, byte: int) -> int:
    lane ^= byte
    for _ in range(8):
        lane = (lane >> 1) ^ (0x82F63B78 if lane & 1 else 0)
    return lane


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference(data: bytes) -> int:
    lanes = list(STARTS)
    padded = data + bytes(-len(data) % 8)
    for i, byte in enumerate(padded):
        lanes[i // 8 % 4] = crc32c_of_byte(lanes[i // 8 % 4], byte)
    low, high = lanes[0] | lanes[1] << 32, lanes[2] | lanes[3] << 32
    return mix(mix(mix((len(data) + 0x9E3779B97F4A7C15) & MASK) ^ low) ^ high)


def native(data: bytes) -> int:
    memory = np.frombuffer(data, np.uint8)
    return _native.checksum(memory.ctypes.data, len(data))


DOCUMENTED = {
    "none": b"",
    "`a`": b"a",
    "`12345678`": b"12345678",
    "0, 1, ..., 31": bytes(range(32)),
    "0, 1, ..., 76": bytes(range(77)),
    "*i*² mod 251 for *i* = 0 ... 9,999": bytes(i * i % 251 for i in range(10_000)),
    "checksum = mix(that ^ high)": b"p2pkv page",
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_documented_values_are_right(name: str) -> None:
    line = re.search(rf"^\| {re.escape(name)} \| `(0x[0-9a-f]{{16}})` \|$", DOC.read_text(), re.MULTILINE)
    assert line is not None
    assert int(line[1], 16) == native(DOCUMENTED[name]) == reference(DOCUMENTED[name])


def test_every_length_agrees_with_the_reference() -> None:
    data = np.random.default_rng(1).integers(0, 256, 200, np.uint8).tobytes()
    for nbytes in range(len(data)):
        assert native(data[:nbytes]) == reference(data[:nbytes])


def test_a_page_is_summed_as_the_concatenation_of_its_pieces() -> None:
    memory = np.random.default_rng(2).integers(0, 256, (3, 1000), np.uint8)
    pieces = np.zeros((3, 3, 2), np.int64)
    for page, cuts in enumerate([(0, 500, 1000), (13, 13, 1000), (1, 999, 1000)]):
        starts = (0, *cuts[:2])
        pieces[page, :, 0] = [memory[page].ctypes.data + start for start in starts]
        pieces[page, :, 1] = np.diff((0, *cuts))
    sums = _native.checksum_pages(pieces)
    assert sums.dtype == np.uint64
    assert sums.tolist() == [reference(page.tobytes()) for page in memory]
