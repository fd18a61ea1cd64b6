"""The format on disk, version 1, byte by byte: what this version writes, and what it must always be able to read."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from disk_pages import hits, keys_of, open_store, spans_of, wait_recovered, write
from p2pkv import _native
from p2pkv.disk.store import LAYOUTS, DiskStore, ReadStatus

GOLDEN = Path(__file__).parents[1] / "golden"
STORE_ID = 0x1122334455667788
NBYTES = 72
NUMBERS = range(3)


def open_golden(folder: Path, layout: str) -> DiskStore:
    return open_store(
        folder,
        layout=layout,
        capacity=8 << 20,
        bucket_size=1 << 20,
        node_id="golden",
        namespace="tenant/é",
        store_id=STORE_ID,
    )


def data_files(folder: Path) -> dict[str, bytes]:
    """Return the parts of a store that the format decides, without the empty rest of preallocated files."""
    parts = {"store": (folder / "store").read_bytes()}
    for path in [*folder.glob("segments/*"), *folder.glob("pages/*/*/*")]:
        parts[str(path.relative_to(folder))] = path.read_bytes()
    for path in [*folder.glob("data"), *folder.glob("meta/*")]:
        content = path.read_bytes()
        for at in range(0, len(content), 4096):
            if any(block := content[at : at + 4096]):
                parts[f"{path.relative_to(folder)}@{at}"] = block
    return parts


def make(folder: Path, layout: str) -> None:
    store = open_golden(folder, layout)
    wait_recovered(store)
    for number in NUMBERS:
        write(store, [number], NBYTES)
    assert store.close()


def packed_page() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the page of docs/codec.md's example, and its packed form."""
    values = np.full(2048, 0x3F80, "<u2")
    values[5], values[1030] = 0x8000, 0x7F80
    return values.view(np.uint8).reshape(1, -1), np.fromfile(GOLDEN / "packed-v1.bin", np.uint8).reshape(
        1, -1
    )


def read_packed(store: DiskStore) -> None:
    page, _ = packed_page()
    out = np.zeros_like(page)
    assert store.read(keys_of([7]), spans_of(out), 10.0).tolist() == [ReadStatus.HIT]
    assert (out == page).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_pages_are_written_as_they_lie(tmp_path: Path, layout: str) -> None:
    page, packed = packed_page()
    store = open_golden(tmp_path, layout)
    wait_recovered(store)
    sums = _native.checksum_pages(spans_of(page).reshape(-1, 1, 2))
    lengths = np.array([page.size], np.uint64)
    tickets = np.zeros(1, np.uint64)
    assert store._native.write(keys_of([7]), spans_of(packed), sums, tickets, lengths).tolist() == [1]
    assert store.flush(30)
    read_packed(store)
    assert store.close()
    golden = GOLDEN / f"disk-{layout}-packed-v1"
    expected = {
        str(path.relative_to(golden)): path.read_bytes() for path in golden.rglob("*") if path.is_file()
    }
    assert data_files(tmp_path) == expected
    store = open_golden(tmp_path, layout)
    wait_recovered(store)
    read_packed(store)
    assert store.close()


def test_packed_bytes_that_hold_another_page_are_not_written(tmp_path: Path) -> None:
    page, packed = packed_page()
    store = open_golden(tmp_path, "bucket")
    wait_recovered(store)
    sums = _native.checksum_pages(spans_of(page).reshape(-1, 1, 2)) + np.uint64(1)
    lengths = np.array([page.size], np.uint64)
    assert store._native.write(
        keys_of([7]), spans_of(packed), sums, np.zeros(1, np.uint64), lengths
    ).tolist() == [1]
    assert store.flush(30)
    assert store.stats()["changed_pages"] == 1
    assert store.contains(keys_of([7])).tolist() == [0]
    assert store.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_this_version_writes_the_golden_bytes(tmp_path: Path, layout: str) -> None:
    make(tmp_path, layout)
    golden = GOLDEN / f"disk-{layout}-v1"
    expected = {
        str(path.relative_to(golden)): path.read_bytes() for path in golden.rglob("*") if path.is_file()
    }
    assert data_files(tmp_path) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_golden_bytes_can_be_read(tmp_path: Path, layout: str) -> None:
    assert open_golden(tmp_path, layout).close()
    golden = GOLDEN / f"disk-{layout}-v1"
    for path in golden.rglob("*"):
        if not path.is_file():
            continue
        name, _, at = str(path.relative_to(golden)).partition("@")
        if not at:
            shutil.copyfile(path, tmp_path / name)
            continue
        with (tmp_path / name).open("r+b") as file:
            file.seek(int(at))
            file.write(path.read_bytes())
    store = open_golden(tmp_path, layout)
    wait_recovered(store)
    assert hits(store, NUMBERS, NBYTES) == list(NUMBERS)
    assert store.close()


def test_the_worked_example_of_the_documentation_is_in_the_golden_file() -> None:
    segment = (GOLDEN / "disk-bucket-v1" / "segments" / "0000000000000001.seg").read_bytes()
    magic, version, flags, key, _, store, _, length, _, _ = struct.unpack_from(
        "<4sHH16sQQQIIQ", segment, 4096
    )
    assert (magic, version, flags, store, length) == (b"p2kr", 1, 0, STORE_ID, NBYTES)
    assert key == bytes(keys_of([0])[0])
    documented = (Path(__file__).parents[2] / "docs" / "disk.md").read_text()
    assert segment[4096:4160].hex(" ", 16) in documented.replace("\n", " ").replace("  ", " ")
