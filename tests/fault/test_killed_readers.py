"""Readers that come, read and are killed, again and again, leave their owner as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster import Cluster, NodeProcess, eventually
from footprint import Footprint

KEYS = [f"page-{i}" for i in range(64)]
NBYTES = 65536
SWARM = Path(__file__).parents[1] / "reader_swarm.py"


@contextmanager
def swarm(kind: str, address: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that lets so many readers come and be killed."""
    process = subprocess.Popen(
        [sys.executable, str(SWARM), kind, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def run(n_readers: int) -> None:
        stdin.write(f"{n_readers}\n")
        stdin.flush()
        assert stdout.readline().strip().isdecimal(), "a reader failed: see above"

    with process:
        try:
            yield run
        finally:
            process.kill()


def start_owner(cluster: Cluster) -> tuple[NodeProcess, str]:
    owner = cluster.spawn("owner")
    address = owner.call("start", **owner.settings)["address"]
    assert all(owner.call("publish", keys=KEYS, nbytes=NBYTES))
    return owner, address


def stays_flat(owner: NodeProcess, run: Callable[[int], None], n_readers: int, *, rss: int) -> None:
    run(20)  # whatever is allocated once is allocated now
    before = Footprint.of(owner.pid)
    run(n_readers)
    print(before, Footprint.of(owner.pid))
    eventually(lambda: Footprint.of(owner.pid).is_as_flat_as(before, rss=rss), 20.0)
    answer = owner.call("fetch", keys=KEYS, nbytes=NBYTES)
    assert all(answer["hits"])
    assert answer["wrong"] == []


def test_200_killed_readers_leave_nothing_behind(cluster: Cluster) -> None:
    owner, address = start_owner(cluster)
    with swarm("raw", address) as run:
        stays_flat(owner, run, 200, rss=4 << 20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_1000_killed_nodes_leave_nothing_behind(cluster: Cluster) -> None:
    owner, _ = start_owner(cluster)
    with swarm("node", cluster.join) as run:
        # The dead are remembered for ten minutes, about a kilobyte each.
        stays_flat(owner, run, 1000, rss=16 << 20)
