"""No hit has a wrong byte, however fast the pages are evicted that it was read from.

A producer churns fresh pages through a small pool while two readers, in processes of their own, look up recent ones,
fetch them and check every byte. Generation words alone stand between a reader and a page that is overwritten meanwhile.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from cluster import Cluster
from hunts.frame import Broken, Hunt, Stop, Tally
from torn_reads import hunt

SIZES = [[4096], [24 << 10], [16 << 10, 24 << 10, 64 << 10, 128 << 10, 256 << 10]]
HITS = 1500
SECONDS = 20.0
"""At most; a schedule ends when the readers had their hits."""


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Churn and read, until there were enough hits."""
    rng = random.Random(seed)
    transport, sizes = rng.choice(["shm", "tcp"]), rng.choice(SIZES)
    compression = rng.choice(["off", "lossless"])
    with Cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        n_hits, n_wrong = hunt(
            cluster,
            Path(folder),
            transport,
            sizes,
            hits=HITS,
            seconds=SECONDS,
            seed=seed,
            shares_copies=rng.random() < 0.5,
            compression=compression,
        )
        if compression != "off":
            producer = cluster.nodes[0]
            producer.answer()  # its churn has ended
            tally["packed"] += int(producer.call("counters")["p2pkv_packed_pages_total"])
        # what was torn, or gone, and noticed: had it been there to the end, this would prove nothing
        for reader in cluster.nodes[1:]:
            tally["torn"] += int(
                reader.call("counters").get('p2pkv_missed_pages_total{reason="rejected"}', 0)
            )
    tally["hits"] += n_hits
    if n_wrong:
        raise Broken(f"{n_wrong} of {n_hits} hits over {transport}, of pages of {sizes} bytes, are wrong")


HUNT = Hunt(
    name="torn_reads",
    promise="no hit has a wrong byte, whatever is evicted meanwhile",
    run=run,
    effects=("hits", "torn", "packed"),
    enough=6,
)
