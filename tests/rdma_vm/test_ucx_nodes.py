"""Whole nodes over ucx on RDMA: pages cross from device to device, an owner dies, and no byte is ever wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Cluster, NodeProcess, eventually
from p2pkv.testing.ports import free_port
from patience import PATIENCE
from rdma_link import n_received
from tests.rdma_vm import over_ucx
from tests.rdma_vm.test_verbs_nodes import KEYS, NBYTES, all_right, fetched, publish
from torn_reads import hunt

_missing = over_ucx.unavailable()
pytestmark = [
    pytest.mark.rdma_slow,
    pytest.mark.skipif(_missing is not None, reason=f"ucx over RDMA: {_missing}"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    secret = tmp_path / "secret"
    secret.write_text("the secret of a test, long enough\n")
    secret.chmod(0o600)
    with Cluster(
        secret_file=str(secret), join=[f"10.77.0.1:{free_port()}"], transports=["ucx"], deadline=2.0
    ) as cluster:
        yield cluster


def start(cluster: Cluster) -> tuple[NodeProcess, NodeProcess]:
    """Start an owner and a reader, each at the address of a device of its own."""
    owner = cluster.start("owner", listen="10.77.0.1:0")
    reader = cluster.start("reader", listen="10.77.0.2:0")
    cluster.meet(owner, reader)
    publish(owner, reader)
    return owner, reader


def test_pages_cross_and_an_owner_that_dies_costs_misses_within_the_deadline(cluster: Cluster) -> None:
    owner, reader = start(cluster)
    before = n_received("rxe1")
    eventually(lambda: all_right(reader), 20.0)
    assert fetched(reader, "ucx") >= len(KEYS)
    assert n_received("rxe1") - before >= len(KEYS) * NBYTES / 4096
    owner.kill()
    began = time.monotonic()
    while time.monotonic() - began < 4.0:
        all_right(reader, 0.5)
    eventually(lambda: len(reader.call("members")) == 1, 10.0)
    assert all(reader.call("publish", keys=KEYS, nbytes=NBYTES))
    assert all_right(reader)


@pytest.mark.timeout(1800)
def test_no_hit_is_ever_wrong(cluster: Cluster, tmp_path: Path) -> None:
    n_hits, n_wrong = hunt(
        cluster,
        tmp_path,
        "ucx",
        [16 << 10],
        hits=2_000,
        seconds=60.0 * PATIENCE,
        batch=64,
        listen="10.77.0.1:0",
    )
    assert n_wrong == 0
    assert n_hits >= 2_000, "too few hits to prove anything"
