"""Readers over verbs that come, read and are killed leave nothing behind, neither here nor in the kernel."""

from __future__ import annotations

import pytest

from cluster import Cluster, eventually
from footprint import Footprint
from p2pkv.transports.verbs import VerbsTransport
from rdma_link import resources
from reader_swarm import swarm

_missing = VerbsTransport.unavailable()
pytestmark = [
    pytest.mark.rdma_slow,
    pytest.mark.skipif(_missing is not None, reason=f"verbs: {_missing}"),
]

KEYS = [f"page-{i}" for i in range(64)]
NBYTES = 65536


def check(cluster: Cluster, n_readers: int) -> None:
    owner = cluster.spawn("owner")
    address = owner.call("start", **owner.settings)["address"]
    assert all(owner.call("publish", keys=KEYS, nbytes=NBYTES))
    nothing = resources(owner.pid)
    with swarm("verbs", address) as run:
        run(2)  # what is allocated once is allocated now
        before = Footprint.of(owner.pid)
        run(n_readers)
    assert resources(owner.pid)["qp"] > nothing["qp"], "nothing was held, so nothing could be left behind"
    # nobody said good-bye: the owner asks every 5 seconds, and waits 4 for an answer
    eventually(lambda: resources(owner.pid) == nothing, 30.0)
    eventually(lambda: Footprint.of(owner.pid).is_as_flat_as(before, rss=8 << 20), 20.0)


@pytest.mark.timeout(600)
def test_killed_readers_leave_no_queue_pair_behind(cluster: Cluster) -> None:
    check(cluster, 40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_1000_killed_readers_leave_no_queue_pair_behind(cluster: Cluster) -> None:
    check(cluster, 1000)
