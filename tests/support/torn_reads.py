"""The hunt for torn reads: a producer churns fresh pages through a small pool while two readers check every byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from cluster import Cluster, NodeProcess
from patience import PATIENCE


def hunt(
    cluster: Cluster,
    tmp_path: Path,
    transport: str,
    sizes: list[int],
    *,
    hits: int,
    seconds: float,
    batch: int = 8,
    sabotage: str = "",
    disk: Path | None = None,
    listen: str = "127.0.0.1:0",
    reader_options: dict[str, object] | None = None,
    prepare: Callable[[NodeProcess], object] | None = None,
    seed: int | None = None,
    shares_copies: bool = False,
    compression: str = "off",
    producer_options: dict[str, object] | None = None,
    attached: bool = False,
) -> tuple[int, int]:
    """Return the hits of all readers, and how many of them had a wrong byte; ``batch`` pages are read at a time.

    With ``disk`` the producer has a disk tier there, so that pages go to it and come back. ``reader_options`` are what
    the readers have beside; ``prepare`` is called with each reader before its hunt. With ``shares_copies`` two threads
    of each process copy every batch. ``compression`` is the producer's; half of the pages can be packed.
    ``producer_options`` are what it has beside: with a device it publishes from there. An ``attached`` producer is an
    engine, and the small pool that of its host's node.
    """
    seed = random.randrange(2**32) if seed is None else seed
    print(f"seed {seed}")
    progress = tmp_path / "progress"
    progress.write_bytes(bytes(16))
    options = {
        "transports": [transport],
        "sabotage": sabotage,
        "listen": listen,
        "shares_copies": shares_copies,
    }
    # Room for about eight batches, where readers look back up to eleven: many pages go while they wait.
    pool_size = 8 * batch * sum(sizes) // len(sizes)
    of_host: dict[str, object] = {}
    if attached:
        (tmp_path / "host").mkdir(mode=0o700)
        path = f"unix:{tmp_path}/host/s"
        cluster.start("host", pool_size=max(pool_size, 256 << 10), attach_listen=path, transports=[transport])
        of_host["attach"] = path
    below = {"disk_path": str(disk), "disk_size": "256MiB"} if disk is not None else {}
    producer = cluster.start(
        "producer",
        pool_size=max(pool_size, 256 << 10),
        compression=compression,
        **options,
        **below,
        **of_host,
        **(producer_options or {}),
    )
    readers = [cluster.start(f"reader-{i}", **options, **(reader_options or {})) for i in range(2)]
    cluster.meet(*([] if attached else [producer]), *readers)
    for reader in readers if prepare is not None else []:
        prepare(reader)
    producer.send("churn", progress=str(progress), sizes=sizes, seed=seed, seconds=seconds, batch=batch)
    for i, reader in enumerate(readers):
        share = -(-hits // len(readers))
        reader.send(
            "hunt",
            progress=str(progress),
            sizes=sizes,
            seed=seed,
            reader=i,
            hits=share,
            seconds=seconds,
            batch=batch,
        )
    found = [reader.answer(seconds / PATIENCE + 30) for reader in readers]
    with progress.open("r+b") as file:
        file.seek(8)
        file.write(b"the end.")
    print(found)
    return sum(f["hits"] for f in found), sum(f["n_wrong"] for f in found)
