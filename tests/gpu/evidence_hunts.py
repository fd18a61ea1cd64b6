"""The hunts of the evidence, for wrong bytes in device memory: of pages, and of rows between processes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cluster import Cluster
from fake_cuda import fake_cuda
from torn_reads import hunt
from torn_rows import Churn, hunt_rows

LENT = (0, 16)
"""Blocks for a kernel that copies pieces: without, and so many that the device keeps up with PCIe."""
EMULATED_SHARE = 8
"""The emulated driver's speed says nothing: an eighth of each case moves bytes in all the same ways."""
_PAGES = [16 << 10, 64 << 10, 256 << 10]
_STAGING = 1 << 19
_HITS = 50_000
_ROW, _N_KILLS = 16 << 10, 4
"""Bytes of a row of the hunt between devices, and how often a side of it is killed."""
_MEETING_S = 10.0

Figure = dict[str, Any]


class Measure(Protocol):
    """Yields figures; of one whose bytes were wrong it says so in ``problem``."""

    def __call__(self, kind: str, seconds: float) -> Iterator[Figure]: ...


def settings_of(kind: str) -> dict[str, Any]:
    """Return what nodes need to be told beside, for device memory of that kind."""
    return {"cuda_library": fake_cuda().path} if kind == "emulated" else {}


def hunts_over(transport: str, blocks: int = 0) -> Measure:
    """Have two readers fetch into device memory what a producer overwrites, and check every byte of every hit.

    ``blocks``: for a kernel that copies what is not large.
    """

    def measure(kind: str, seconds: float) -> Iterator[Figure]:
        seed = int.from_bytes(np.random.default_rng().bytes(4), "little")
        reader = {"device": kind, "device_staging_size": _STAGING, **settings_of(kind)}
        reader["device_kernel_blocks"] = blocks
        by = f", by a kernel of {blocks} blocks" if blocks else ""
        figure: Figure = {"what": f"hits over {transport} into device memory{by}", "seed": seed}
        with tempfile.TemporaryDirectory(prefix="p2pkv-evidence-") as folder, Cluster() as cluster:
            began = time.monotonic()
            n_hits, n_wrong = hunt(
                cluster,
                Path(folder),
                transport,
                _PAGES,
                hits=_HITS,
                seconds=max(1.0, seconds - _MEETING_S),
                reader_options=reader,
                seed=seed,
            )
        figure |= {"hits": n_hits, "wrong": n_wrong, "took_s": round(time.monotonic() - began, 1)}
        if n_wrong:
            figure["problem"] = f"{n_wrong} of {n_hits} hits over {transport} had a wrong byte, seed {seed}"
        elif n_hits < _HITS:
            figure["left_out"] = f"{_HITS} were meant"
        yield figure

    return measure


def hunt_between_devices(kind: str, seconds: float) -> Iterator[Figure]:
    """Have two processes hand each other rows that are overwritten soon after, and kill either now and then."""
    wanted = _HITS // (EMULATED_SHARE if kind == "emulated" else 1)
    until = time.monotonic() + seconds
    for i, blocks in enumerate(LENT):
        seed = int.from_bytes(np.random.default_rng().bytes(4), "little")
        by = f", by a kernel of {blocks} blocks" if blocks else ""
        figure: Figure = {"what": f"rows over cuda_ipc from device to device{by}", "seed": seed}
        with tempfile.TemporaryDirectory(prefix="p2pkv-evidence-") as folder, Cluster() as cluster:
            began = time.monotonic()
            share = (until - began) / (len(LENT) - i)
            seen = hunt_rows(
                cluster,
                Path(folder),
                Churn(kind, _ROW),
                rows=wanted,
                seconds=max(1.0, share - _MEETING_S / 2),
                n_kills=_N_KILLS,
                seed=seed,
                settings=settings_of(kind) | {"device_kernel_blocks": blocks},
            )
        figure |= {"hits": seen.right, "wrong": seen.wrong, "took_s": round(time.monotonic() - began, 1)}
        figure |= {"not_ok": seen.not_ok, "kills": seen.kills, "went_directly": seen.direct_bytes > 0}
        if seen.wrong:
            figure["problem"] = f"{seen.wrong} rows over cuda_ipc were wrong, seed {seed}: {seen.found}"
        elif seen.right < wanted or sum(seen.kills.values()) < _N_KILLS:
            figure["left_out"] = f"{wanted} with {_N_KILLS} kills were meant"
        yield figure
