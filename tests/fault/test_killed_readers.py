"""Readers that come, read and are killed, again and again, leave their owner as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster import Cluster, NodeProcess, all_are_fetched, eventually
from footprint import Footprint
from reader_swarm import swarm

KEYS = [f"page-{i}" for i in range(64)]
NBYTES = 65536


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
    all_are_fetched(owner, KEYS, NBYTES)


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
