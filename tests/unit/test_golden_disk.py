"""The format on disk, version 1, byte by byte: what this version writes, and what it must always be able to read."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from disk_pages import hits, keys_of, open_store, wait_recovered, write
from p2pkv.disk.store import LAYOUTS, DiskStore

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
