"""Rows that two processes hand each other from device to device are right, whoever of them is killed.

A producer offers rows of its device's memory and overwrites them soon after; a consumer maps that memory over cuda_ipc,
takes rows into its own, and checks every byte. Either is killed in the middle and started again, with the same id, the
same address, and memory that looks the same to the other one.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from cluster import Cluster
from fake_cuda import fake_cuda, has_fake_cuda
from hunts.frame import Broken, Hunt, Stop, Tally
from torn_rows import ROLES, Churn, hunt_rows

ROWS = 1500
SECONDS = 100.0
"""At most; a schedule ends when the consumer had its rows."""


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Churn, take and kill, until enough rows were right."""
    if not has_fake_cuda():
        tally["left out for want of a compiler"] += 1
        return
    rng = random.Random(seed)
    churn = Churn(
        rng.choice(["emulated", "emulated_virtual"]),
        rng.choice([4096, 16 << 10, 64 << 10]),
        delay_us=rng.choice([0, 100, 1000]),
    )
    blocks = rng.choice([0, 4])
    settings = {"cuda_library": fake_cuda().path, "device_kernel_blocks": blocks}
    with Cluster() as cluster, tempfile.TemporaryDirectory(prefix="p2pkv-hunt-") as folder:
        seen = hunt_rows(
            cluster,
            Path(folder),
            churn,
            rows=ROWS,
            seconds=SECONDS,
            n_kills=rng.randint(2, 3),
            seed=seed,
            settings=settings,
        )
    tally["rows right"] += seen.right
    tally["rows not OK"] += seen.not_ok
    for role in ROLES:
        tally[f"{role}s killed"] += seen.kills[role]
    tally["MiB from device to device"] += int(seen.direct_bytes) >> 20
    if seen.wrong:
        raise Broken(
            f"{seen.wrong} rows of {churn} are OK and wrong, or written to when revoked: {seen.found}"
        )
    if seen.right < ROWS:
        raise Broken(f"{seen.right} rows of {churn} came in {SECONDS:.0f} s, after {seen.kills}")


HUNT = Hunt(
    name="torn_rows",
    promise="no row that went from device to device is OK and wrong, whoever is killed",
    run=run,
    effects=(
        "rows right",
        "rows not OK",
        "producers killed",
        "consumers killed",
        "MiB from device to device",
    ),
    enough=6,
)
