"""A page that is packed comes back as it was, whatever its values, its length and where it lies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_values import KINDS
from p2pkv.page import as_bytes
from p2pkv.pool import FetchStatus, Pool, PoolStatus
from packed_pages import BLOCK, stored, unpack

GOLDEN = Path(__file__).parents[1] / "golden" / "packed-v1.bin"
KEYS = np.arange(16, dtype=np.uint8).reshape(1, 16)
SPECIAL = [
    0x0000,
    0x8000,
    0x0001,
    0x807F,
    0x7F80,
    0xFF80,
    0x7FC1,
    0xFFFF,
    0x7C00,
    0xFC01,
    0x03FF,
    0x7BFF,
    0x3F80,
    0x3C00,
]
"""Zeros, denormals, infinities and NaNs with payloads, of bfloat16 and float16."""


@st.composite
def pages(draw: st.DrawFn) -> NDArray[np.uint8]:
    """Draw a page of some mixture of values."""
    n = draw(st.integers(0, 5 * BLOCK // 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["bf16", "fp16", "special", "anything", "one", "every other"]))
    numbers = rng.normal(size=n).astype(np.float32) * np.exp2(draw(st.integers(-30, 30)))
    if kind == "fp16":
        values = np.clip(numbers, -60000, 60000).astype(np.float16).view(np.uint16)
    else:
        values = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    share = {"special": 0.1, "anything": 1.0, "every other": 0.5}.get(kind, 0.0) * draw(
        st.sampled_from([0.1, 0.5, 1])
    )
    chosen = rng.random(n) < share
    odd = rng.choice(SPECIAL, n) if kind == "special" else rng.integers(0, 1 << 16, n)
    values = np.where(chosen, odd, values).astype("<u2")
    if kind == "one":
        values[:] = draw(st.sampled_from(SPECIAL))
    raw = values.view(np.uint8)
    shift = draw(st.sampled_from([0, 0, 0, 1]))
    return np.concatenate([raw[shift:], rng.integers(0, 256, draw(st.integers(1, 3)), np.uint8)])


def cut(memory: NDArray[np.uint8], at: int, nbytes: int, cuts: list[int]) -> NDArray[np.int64]:
    """Describe ``nbytes`` of memory, from ``at`` on, as pieces with a byte between any two."""
    ends = [*sorted(cut % (nbytes + 1) for cut in cuts), nbytes]
    starts = [0, *ends[:-1]]
    pieces = [
        (memory.ctypes.data + at + start + i, end - start)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
        if end > start
    ]
    return np.array([pieces], np.int64)


def write(memory: NDArray[np.uint8], pieces: NDArray[np.int64], page: NDArray[np.uint8]) -> None:
    done = 0
    for address, nbytes in pieces[0].tolist():
        first = address - memory.ctypes.data
        memory[first : first + nbytes] = page[done : done + nbytes]
        done += nbytes


def read(memory: NDArray[np.uint8], pieces: NDArray[np.int64]) -> NDArray[np.uint8]:
    base = memory.ctypes.data
    return np.concatenate([memory[a - base : a - base + n] for a, n in pieces[0].tolist()])


@given(
    page=pages(), at=st.integers(0, 70), cuts=st.lists(st.integers(0, 1 << 20), max_size=4), data=st.data()
)
@settings(max_examples=150, deadline=None)
def test_a_packed_page_comes_back_as_it_was(
    page: NDArray[np.uint8], at: int, cuts: list[int], data: st.DataObject
) -> None:
    pool = Pool(1 << 16, owner=1, boot=1, granule=64, compression="lossless")
    memory = np.full(len(page) + 128, 0xEE, np.uint8)
    pieces = cut(memory, at, len(page), cuts)
    write(memory, pieces, page)
    statuses, locations, *_ = pool.publish(KEYS, pieces)
    assert statuses.tolist() == [PoolStatus.STORED]
    assert locations["length"][0] == len(page)
    lies = stored(pool, locations)
    assert (unpack(lies) if locations["flags"][0] >> 4 else lies) == page.tobytes()

    memory[:] = 0xEE
    again = cut(
        memory,
        data.draw(st.integers(0, 70)),
        len(page),
        data.draw(st.lists(st.integers(0, 1 << 20), max_size=4)),
    )
    assert pool.fetch(KEYS, again).tolist() == [FetchStatus.HIT]
    assert (read(memory, again) == page).all()
    write(memory, again, np.full(len(page), 0xEE, np.uint8))
    assert (memory == 0xEE).all(), "something beside the page was written"
    pool.close()
    pool.release_memory()


def golden_page() -> NDArray[np.uint8]:
    """Make the page of the example in docs/codec.md."""
    values = np.full(BLOCK // 2, 0x3F80, "<u2")
    values[5], values[1030] = 0x8000, 0x7F80
    return values.view(np.uint8)


def test_the_packed_form_of_version_1_is_what_it_was() -> None:
    page = golden_page()
    pool = Pool(1 << 16, owner=1, boot=1, granule=64, compression="lossless")
    _, locations, *_ = pool.publish(KEYS, cut(page, 0, len(page), []))
    assert stored(pool, locations) == GOLDEN.read_bytes()
    assert unpack(GOLDEN.read_bytes()) == page.tobytes()


def test_the_location_of_a_packed_page_proves_nothing_to_who_knows_none() -> None:
    page = golden_page()
    for compression in ("off", "lossless"):
        pool = Pool(1 << 16, owner=1, boot=1, granule=64, compression=compression)
        _, locations, *_ = pool.publish(KEYS, cut(page, 0, len(page), []))
        is_packed = compression == "lossless"
        assert as_bytes(locations)[0, 60] & 0x0F == 1
        assert locations["flags"][0] >> 4 == (49 if is_packed else 0)
        assert locations["generation"][0] % 2 == is_packed
        assert locations["length"][0] == len(page)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_packed_pages_of_real_values_are_right(kind: str) -> None:
    content = KINDS[kind]().view(np.uint8)
    for nbytes in (64 << 10, 1 << 20):
        rows = content[: len(content) // nbytes * nbytes].reshape(-1, nbytes)
        pool = Pool(content.nbytes + (1 << 20), owner=1, boot=1, compression="lossless")
        keys = np.zeros((len(rows), 16), np.uint8)
        keys.view(np.uint64)[:, 0] = np.arange(len(rows)) + 1
        pieces = np.array([[[row.ctypes.data, nbytes]] for row in rows], np.int64)
        assert (pool.publish(keys, pieces).statuses == PoolStatus.STORED).all()
        out = np.zeros_like(rows)
        pieces = np.array([[[row.ctypes.data, nbytes]] for row in out], np.int64)
        assert (pool.fetch(keys, pieces) == FetchStatus.HIT).all()
        assert (out == rows).all()
        print(
            f"{kind}, {nbytes >> 10} KiB: {rows.nbytes / pool.stats()['used']:.3f} times smaller in the pool"
        )
        pool.close()
        pool.release_memory()
