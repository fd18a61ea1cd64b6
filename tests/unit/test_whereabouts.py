"""Where pages are: which node has them, and whether in memory or on its disk only."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cluster import eventually
from p2pkv import Config, Node, Outcome
from p2pkv.testing.ports import free_port

NBYTES = 4096
SETTLE_S = 30.0


def test_who_has_a_page_and_where_is_said(tmp_path: Path) -> None:
    join = [f"127.0.0.1:{free_port()}"]
    disk = {"disk_path": str(tmp_path / "disk"), "disk_size": "8MiB"}
    settings = {"node_id": "a", "join": join, "pool_size": "256KiB"} | disk
    with Node.start(Config.load(settings, environ={})) as a, Node.start(Config(node_id="b", join=join)) as b:
        eventually(lambda: len(b.members()) == 2, SETTLE_S)
        rows = np.ones((4, NBYTES), np.uint8)
        a.register_memory(rows)
        other = np.ones((2, 2 * NBYTES), np.uint8)
        b.register_memory(other)
        # a disk that is late is not waited for: what it was to have would be left out
        eventually(lambda: a.counters()["p2pkv_disk_suspended"] == 0, SETTLE_S)
        a.publish([f"old-{i}" for i in range(4)], rows)
        eventually(lambda: a.counters()["p2pkv_disk_stored_pages_total"] == 4, SETTLE_S)
        b.publish(["b-0", "b-1"], other)
        for i in range(40):  # more than fits into the pool
            a.publish([f"{i}-{k}" for k in range(4)], rows)
        own = a.whereabouts(["39-0", "old-0", "nobody's"])
        assert own.outcomes.tolist() == [Outcome.HIT, Outcome.HIT, Outcome.MISS]
        assert own.is_on_disk.tolist()[:2] == [False, True]

        keys = ["39-0", "old-0", "nobody's", "b-1"]
        seen = []

        def is_known_to_be_on_disk() -> bool:
            """Ask until the eviction is known; a look-up after that has the page brought into memory again."""
            seen.append(b.whereabouts(keys))
            return bool(seen[-1].is_on_disk[1])

        eventually(is_known_to_be_on_disk, SETTLE_S)
        there = seen[-1]
        assert there.outcomes.tolist() == [Outcome.HIT, Outcome.HIT, Outcome.MISS, Outcome.HIT]
        assert there.is_on_disk[[0, 1, 3]].tolist() == [False, True, False]
        assert there.owners[0] == there.owners[1] == own.owners[0] != there.owners[3]
        assert there.nbytes[[0, 1, 3]].tolist() == [NBYTES, NBYTES, 2 * NBYTES]
