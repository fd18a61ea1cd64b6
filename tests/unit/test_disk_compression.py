"""Compressed records: smaller, never wrong, and side by side with those of a store that does not compress."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from disk_pages import keys_of, open_store, spans_of, wait_recovered
from p2pkv import _native
from p2pkv.disk.store import LAYOUTS, DiskStore, ReadStatus
from p2pkv.errors import ConfigError

pytestmark = pytest.mark.skipif(bool(_native.zstd_missing()), reason=_native.zstd_missing())

GOLDEN = Path(__file__).parents[1] / "golden"
NBYTES = 32 << 10


def values(number: int, nbytes: int = NBYTES) -> NDArray[np.uint8]:
    """Return a page as a model leaves it: bfloat16 values around zero."""
    floats = np.random.default_rng(number).standard_normal(nbytes // 2 + 1).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)[:nbytes].copy()


def noise(number: int, nbytes: int = NBYTES) -> NDArray[np.uint8]:
    """Return a page that nothing makes smaller."""
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


def put(store: DiskStore, pages: dict[int, NDArray[np.uint8]]) -> None:
    for number, page in pages.items():
        spans = spans_of(page[None])
        sums = _native.checksum_pages(spans.reshape(-1, 1, 2))
        assert store.write(keys_of([number]), spans, sums, np.array([number], np.uint64)).all()
    assert store.flush(20)


def get(store: DiskStore, pages: dict[int, NDArray[np.uint8]]) -> int:
    """Read them; the number of hits. A wrong byte fails."""
    n_hits = 0
    for number, page in pages.items():
        out = np.zeros((1, len(page)), np.uint8)
        if store.read(keys_of([number]), spans_of(out), 10.0)[0] == ReadStatus.HIT:
            assert (out[0] == page).all()
            n_hits += 1
    return n_hits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compressed_pages_are_smaller_and_come_back(tmp_path: Path, layout: str) -> None:
    pages = {n: values(n) for n in range(40)} | {n: noise(n, NBYTES - 8) for n in range(40, 50)}
    pages |= {50: np.zeros(1 << 19, np.uint8), 51: values(51, 7), 52: values(52, 32 * 1024 + 9)}
    store = open_store(tmp_path, layout=layout, compression="zstd")
    put(store, pages)
    assert get(store, pages) == len(pages)
    stats = store.stats()
    compressible = sum(page.nbytes for number, page in pages.items() if number < 40)
    raw = stats["stored_bytes"]
    assert raw == sum(page.nbytes for page in pages.values())
    assert stats["written_bytes"] < raw - 500_000 - 0.2 * compressible
    assert store.close()
    again = open_store(tmp_path, layout=layout)  # who does not compress reads what is compressed
    wait_recovered(again)
    assert get(again, pages) == len(pages)
    assert again.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_kinds_of_records_live_in_one_store(tmp_path: Path, layout: str) -> None:
    pages = {}
    for first, compression in enumerate(["off", "zstd", "off", "zstd"]):
        store = open_store(tmp_path, layout=layout, compression=compression)
        wait_recovered(store)
        added = {n: values(n) for n in range(8 * first, 8 * first + 8)}
        put(store, added)
        pages |= added
        assert get(store, pages) == len(pages)
        assert store.close()


def test_a_segment_that_was_not_sealed_is_scanned(tmp_path: Path) -> None:
    pages = {n: values(n) for n in range(40)}
    store = open_store(tmp_path / "one", compression="zstd")
    put(store, pages)
    shutil.copytree(tmp_path / "one", tmp_path / "two")  # as a kill now would leave it
    again = open_store(tmp_path / "two")
    wait_recovered(again)
    assert get(again, pages) == len(pages)
    assert store.close()
    assert again.close()


def damage(path: Path, chance: random.Random) -> None:
    """Flip a bit in each of three bytes."""
    used = np.flatnonzero(np.frombuffer(path.read_bytes(), np.uint8))
    for at in chance.sample(used.tolist(), 3):
        with path.open("r+b") as file:
            file.seek(at)
            before = file.read(1)[0]
            file.seek(at)
            file.write(bytes([before ^ 1 << chance.randrange(8)]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_compressed_data_is_found(tmp_path: Path, layout: str) -> None:
    seed = int(os.environ.get("P2PKV_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"P2PKV_SEED={seed}")
    chance = random.Random(seed)
    pages = {n: values(n, 4096) for n in range(50)}
    store = open_store(tmp_path, layout=layout, compression="zstd")
    put(store, pages)
    n_damaged = 0
    hit: set[Path] = set()
    while n_damaged < 20:
        # A page that is bad may lie about until the writer has deleted it, and is not bad twice.
        own = [path for path in tmp_path.glob("pages/*/*/*") if path not in hit]
        files = [*tmp_path.glob("segments/*"), *own, *tmp_path.glob("data")]
        file = chance.choice(files)
        try:
            damage(file, chance)
        except FileNotFoundError:  # that of a bad record, which the writer deletes behind the reader's back
            continue
        n_damaged += 1
        hit.add(file)
        get(store, pages)  # which fails at a wrong byte
    assert 10 < store.stats()["bad_records"] <= 50
    assert get(store, pages) == 50 - store.stats()["bad_records"]
    assert store.close()


def open_golden(folder: Path, layout: str) -> DiskStore:
    return open_store(
        folder,
        layout=layout,
        capacity=8 << 20,
        bucket_size=1 << 20,
        node_id="golden",
        namespace="tenant/é",
        store_id=0x1122334455667788,
        compression="zstd",
    )


GOLDEN_PAGES = {n: np.arange(n, n + 2048, dtype=np.uint16).view(np.uint8) for n in range(3)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_golden_compressed_records_can_be_read(tmp_path: Path, layout: str) -> None:
    # what this zstd would write may differ from version to version, so only reading is compared
    assert open_golden(tmp_path, layout).close()
    golden = GOLDEN / f"disk-{layout}-zstd-v1"
    for path in sorted(golden.rglob("*")):
        if path.is_file():
            name, _, at = str(path.relative_to(golden)).partition("@")
            with (tmp_path / name).open("r+b" if at else "wb") as file:
                file.seek(int(at or 0))
                file.write(path.read_bytes())
    store = open_golden(tmp_path, layout)
    wait_recovered(store)
    assert get(store, GOLDEN_PAGES) == 3
    assert store.close()


def test_without_the_library_there_is_a_sentence_and_no_store() -> None:
    assert "install it" in _native.zstd_missing("libzstd-that-is-not-there.so.9")
    with pytest.raises(ConfigError, match="disk compression must be one of off, zstd"):
        open_store("/nowhere", compression="lz4")
