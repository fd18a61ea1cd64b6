"""Whatever happens to the bytes of a disk store behind its back, a read returns the right ones or misses."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from disk_pages import folder_in_memory, hits, keys_of, open_store, read, wait_recovered, write
from p2pkv import _native
from p2pkv.disk.store import LAYOUTS, ReadStatus

PAGE = 1024
N_PAGES = 1000
HEADER = struct.Struct("<IHH16sQQQIIQ")
MAGIC = b"p2kr"

pytestmark = pytest.mark.timeout(1800)


@dataclass(frozen=True, slots=True)
class Record:
    """Where a page lies, found without any help of the store."""

    path: Path
    offset: int
    number: int
    nbytes: int


def find_records(folder: Path) -> list[Record]:
    numbers = {bytes(key): number for number, key in enumerate(keys_of(range(N_PAGES)))}
    files = [*folder.glob("segments/*.seg"), *folder.glob("pages/*/*/*.page"), *folder.glob("data")]
    records = []
    for path in files:
        content = path.read_bytes()
        at = content.find(MAGIC)
        while at >= 0:
            if at % 64 == 0:
                _, _, _, key, _, _, _, length, stored, _ = HEADER.unpack_from(content, at)
                records.append(Record(path, at, numbers[key], HEADER.size + (stored or length)))
            at = content.find(MAGIC, at + 1)
    assert len(records) == N_PAGES
    return records


def damaged(chance: random.Random, own: bytes, other: bytes) -> bytes:
    """Return what a broken disk, or a misdirected write, may have made of a record."""
    kind = chance.randrange(5)
    at = chance.randrange(len(own))
    if kind == 0:  # a flipped bit
        return own[:at] + bytes([own[at] ^ 1 << chance.randrange(8)]) + own[at + 1 :]
    if kind == 1:  # the end is missing
        return own[:at] + bytes(len(own) - at)
    if kind == 2:  # a sector of zeros
        at = at // 512 * 512
        return (own[:at] + bytes(512) + own[at + 512 :])[: len(own)]
    if kind == 3:  # another page's record, whole and right unless it is longer than there is room
        return other[: len(own)] + own[len(other) :]
    return own[:at] + other[at : len(own)] + own[max(at, len(other)) :]  # torn


def make_store(folder: Path, layout: str, compression: str = "off") -> None:
    store = open_store(folder, layout=layout, capacity=16 << 20, compression=compression)
    write(store, range(N_PAGES), PAGE, small=True)
    stats = store.stats()
    assert (stats["written_bytes"] < 0.9 * stats["stored_bytes"]) == (compression != "off")
    assert store.close()


def copies(folder: Path, layout: str, n: int, compression: str = "off") -> Iterator[Path]:
    """Yield ``n`` copies of a store, each of which is gone when the next one comes.

    Of one with a file for each page the original is in memory: a device takes seconds to be given a thousand.
    """
    with ExitStack() as original:
        pristine = folder / "pristine"
        if layout == "file":
            pristine = original.enter_context(folder_in_memory(folder, N_PAGES * 8192))
        make_store(pristine, layout, compression)
        for _ in range(n):
            copy = folder / "copy"
            shutil.copytree(pristine, copy)
            yield copy
            shutil.rmtree(copy)


def damage_all(folder: Path, chance: random.Random) -> set[int]:
    """Damage every record where it lies; return the numbers of those whose bytes really changed."""
    records = find_records(folder)
    before = {}
    for record in records:
        with record.path.open("rb") as file:
            file.seek(record.offset)
            before[record] = file.read(record.nbytes)
    changed = set()
    for record in records:
        own, other = before[record], before[chance.choice(records)]
        after = damaged(chance, own, other)
        assert len(after) == len(own)
        if after != own:
            changed.add(record.number)
        with record.path.open("r+b") as file:
            file.seek(record.offset)
            file.write(after)
    return changed


@pytest.fixture
def chance() -> random.Random:
    seed = int(os.environ.get("P2PKV_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"P2PKV_SEED={seed}")
    return random.Random(seed)


def hunt(folder: Path, layout: str, chance: random.Random, rounds: int, compression: str = "off") -> int:
    """Damage records under an open store, ``rounds`` times each; return how many changes it found."""
    n_found = 0
    for copy in copies(folder, layout, rounds, compression):
        store = open_store(copy, layout=layout, capacity=16 << 20)
        wait_recovered(store)
        assert hits(store, range(N_PAGES), PAGE, small=True) == list(range(N_PAGES))
        changed = damage_all(copy, chance)
        present = set(hits(store, range(N_PAGES), PAGE, small=True))
        found = set(range(N_PAGES)) - present
        # of compressed bytes some bits mean nothing: what is read then is right, and `hits` has seen that it is
        assert found <= changed if compression != "off" else found == changed
        assert store.stats()["bad_records"] + store.stats()["read_errors"] == len(found)
        assert set(map(bytes, store.drain_dropped(N_PAGES, 0.0))) == set(map(bytes, keys_of(sorted(found))))
        assert not store.contains(keys_of(sorted(found))).any()
        n_found += len(found)
        store.close()
    return n_found


def hunt_in_metadata(folder: Path, layout: str, chance: random.Random, rounds: int) -> int:
    """Damage what says where pages lie, of a closed store, once a start; return how often."""
    for copy in copies(folder, layout, rounds):
        pages = sorted(copy.glob("pages/*/*/*.page"))
        for _ in range(8):
            if layout == "file":
                damage_a_name(pages, chance)
            else:
                damage_metadata(copy, layout, chance)
        store = open_store(copy, layout=layout, capacity=16 << 20)
        wait_recovered(store)
        present = hits(store, range(N_PAGES), PAGE, small=True)  # checks their bytes
        # a segment whose index can't be trusted is scanned; a slot or a name was all there was to know
        assert len(present) >= (N_PAGES if layout == "bucket" else N_PAGES - 32)
        store.close()
    return 8 * rounds


def damage_a_name(pages: list[Path], chance: random.Random) -> None:
    """Rename one of ``pages``, and have its new name among them."""
    number = chance.randrange(len(pages))
    name = pages[number].name
    at = chance.randrange(len(name) - len(".page"))
    digit = chance.choice("0123456789abcdef-")
    pages[number] = pages[number].rename(pages[number].with_name(name[:at] + digit + name[at + 1 :]))


def damage_metadata(folder: Path, layout: str, chance: random.Random) -> None:
    if layout == "bucket":
        path = chance.choice(sorted(folder.glob("segments/*.seg")))
        content = path.read_bytes()
        (start,) = (
            struct.unpack_from("<Q", content, len(content) - 32) if content[-64:-60] == b"p2kf" else (0,)
        )
        start = start if 0 < start < len(content) else len(content) - 64
        regions = [(start, len(content))]
        head = (0, 40)
        first, last = chance.choice([*regions, *regions, head])
    else:
        path = chance.choice(sorted(folder.glob("meta/*")))
        content = path.read_bytes()
        used = np.flatnonzero(np.frombuffer(content, np.uint8))
        first, last = int(used[0]), int(used[-1]) + 1
    at = chance.randrange(first, last)
    with path.open("r+b") as file:
        file.seek(at)
        kind = chance.randrange(3)
        if kind == 0:
            file.write(bytes([content[at] ^ 1 << chance.randrange(8)]))
        elif kind == 1:
            file.write(bytes(min(64, last - at)))
        elif layout == "bucket" and at >= start:
            file.truncate(at)
        else:
            file.write(chance.randbytes(min(16, last - at)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_records_are_found_dropped_and_counted(
    tmp_path: Path, layout: str, chance: random.Random
) -> None:
    assert hunt(tmp_path, layout, chance, 1) > N_PAGES * 0.9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_store_with_damaged_metadata_starts_and_serves_no_wrong_byte(
    tmp_path: Path, layout: str, chance: random.Random
) -> None:
    hunt_in_metadata(tmp_path, layout, chance, 10)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hundred_thousand_damages_are_all_found(tmp_path: Path, layout: str, chance: random.Random) -> None:
    records, metadata = tmp_path / "records", tmp_path / "metadata"
    records.mkdir()
    metadata.mkdir()
    n_found = hunt(records, layout, chance, 106)
    assert n_found + hunt_in_metadata(metadata, layout, chance, 250) >= 100_000


@pytest.mark.slow
@pytest.mark.skipif(bool(_native.zstd_missing()), reason=_native.zstd_missing())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damages_of_compressed_records_are_found_or_harmless(
    tmp_path: Path, layout: str, chance: random.Random
) -> None:
    assert hunt(tmp_path, layout, chance, 25, "zstd") > 0.95 * 25 * N_PAGES * 0.95


def test_without_the_check_damage_becomes_wrong_bytes(tmp_path: Path, chance: random.Random) -> None:
    # The safeguard broken on purpose: if this sees no harm, the tests above prove nothing.
    make_store(tmp_path, "bucket")
    store = open_store(tmp_path, verify=False)
    wait_recovered(store)
    damage_all(tmp_path, chance)
    with pytest.raises(AssertionError, match="wrong bytes"):
        read(store, range(N_PAGES), PAGE, small=True)
    store.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_cut_short_lose_only_what_was_cut(tmp_path: Path, layout: str, chance: random.Random) -> None:
    make_store(tmp_path, layout)
    store = open_store(tmp_path, layout=layout, capacity=16 << 20)
    wait_recovered(store)
    records = find_records(tmp_path)
    lengths = {}
    for path in {record.path for record in records}:
        last = max(record.offset + record.nbytes for record in records if record.path == path)
        lengths[path] = chance.randrange(last)
        os.truncate(path, lengths[path])
    whole = {r.number for r in records if r.offset + r.nbytes <= lengths[r.path]}
    assert set(hits(store, range(N_PAGES), PAGE, small=True)) == whole
    assert (read(store, sorted(set(range(N_PAGES)) - whole), PAGE, small=True) == ReadStatus.MISS).all()
    store.close()
