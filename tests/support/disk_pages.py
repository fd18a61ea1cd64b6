"""Pages for the disk store: every byte follows from the page's number, so that a wrong one shows."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster import eventually
from p2pkv import _native
from p2pkv.disk.store import DEFAULT_CLUSTER, DiskOptions, DiskStore, Flags, ReadStatus
from p2pkv.page import Keys

PAGE = 8192
_WORDS = np.arange(1, (4 << 20) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_MASK = np.uint64(0x03FF03FF03FF03FF)
"""Makes the high bytes of 16-bit values alike."""


@contextlib.contextmanager
def folder_in_memory(otherwise: Path, nbytes: int) -> Iterator[Path]:
    """Make a folder whose files are in memory; below ``otherwise`` where there is no such with so much room."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 2 * nbytes
    with tempfile.TemporaryDirectory(prefix="p2pkv-", dir=memory if has_room else otherwise) as folder:
        yield Path(folder) / "store"


def keys_of(numbers: NDArray[np.int64] | list[int] | range) -> Keys:
    digests = [hashlib.blake2b(int(i).to_bytes(8, "little"), digest_size=16).digest() for i in numbers]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), 16)


def pages_of(
    numbers: NDArray[np.int64] | list[int] | range, nbytes: int = PAGE, *, small: bool = False
) -> NDArray[np.uint8]:
    """Return ``(n, nbytes)``; ``nbytes`` is a multiple of 8. ``small``: a store that compresses makes them smaller."""
    salts = (np.asarray(list(numbers), np.uint64) + np.uint64(1)) * _MULTIPLIER
    words = _WORDS[: nbytes // 8][None, :] ^ salts[:, None]
    return (words & _MASK if small else words).view(np.uint8)


def spans_of(memory: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Describe each row."""
    spans = np.empty((len(memory), 2), np.int64)
    spans[:, 0] = memory.ctypes.data + np.arange(len(memory)) * memory.shape[1]
    spans[:, 1] = memory.shape[1]
    return spans


def open_store(path: Path | str, **options: Any) -> DiskStore:
    """Open a small store of node ``n1`` in namespace ``ns`` unless told otherwise."""
    node_id = options.pop("node_id", "n1")
    namespace = options.pop("namespace", "ns")
    cluster = options.pop("cluster", DEFAULT_CLUSTER)
    faults = options.pop("faults", None)
    store_id = options.pop("store_id", 0)
    verify = options.pop("verify", True)
    settings: dict[str, Any] = {"capacity": 16 << 20, "retry_seconds": 0.05}
    return DiskStore(
        str(path),
        DiskOptions(**(settings | options)),
        node_id=node_id,
        namespace=namespace,
        cluster=cluster,
        faults=faults,
        store_id=store_id,
        verify=verify,
    )


def write(
    store: DiskStore,
    numbers: list[int] | range,
    nbytes: int = PAGE,
    *,
    flush: bool = True,
    timeout: float = 30.0,
    small: bool = False,
) -> Flags:
    """Write pages and wait until their memory is free again; returns which were accepted."""
    memory = pages_of(numbers, nbytes, small=small)
    spans = spans_of(memory)
    checksums = _native.checksum_pages(spans.reshape(-1, 1, 2))
    tickets = np.array(list(numbers), np.uint64)
    accepted = store.write(keys_of(numbers), spans, checksums, tickets)
    n_left = int(accepted.sum())
    while n_left:
        released = len(store.drain_released(n_left, timeout))
        assert released, "tickets were not released in time"
        n_left -= released
    if flush:
        assert store.flush(timeout)
    return accepted


def read(
    store: DiskStore,
    numbers: list[int] | range,
    nbytes: int = PAGE,
    timeout: float = 10.0,
    *,
    small: bool = False,
) -> NDArray[np.uint8]:
    """Read pages; returns their statuses. A wrong byte in a hit is an assertion."""
    out = np.zeros((len(numbers), nbytes), np.uint8)
    statuses = store.read(keys_of(numbers), spans_of(out), timeout)
    hits = statuses == ReadStatus.HIT
    right = (out == pages_of(numbers, nbytes, small=small)).all(axis=1)
    assert right[hits].all(), f"wrong bytes in pages {np.asarray(list(numbers))[hits & ~right].tolist()}"
    return statuses


def hits(
    store: DiskStore, numbers: list[int] | range, nbytes: int = PAGE, *, small: bool = False
) -> list[int]:
    """Read pages; the numbers of those that were there."""
    statuses = read(store, numbers, nbytes, small=small)
    return [int(number) for number, status in zip(numbers, statuses, strict=True) if status == ReadStatus.HIT]


def wait_recovered(store: DiskStore, timeout: float = 60.0) -> None:
    """Return when all that an earlier run left has been found."""
    eventually(lambda: store.is_recovered, timeout)


def occupied(path: Path | str) -> int:
    """Bytes that the folder occupies on the disk, folders and all."""
    total = os.lstat(path).st_blocks * 512
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                if entry.is_dir(follow_symlinks=False):
                    total += occupied(entry.path)
                else:
                    total += os.lstat(entry.path).st_blocks * 512
    return total
