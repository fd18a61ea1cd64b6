"""Whole nodes over verbs: two devices as two nodes and as two rails, owners that die, ways that fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster import Cluster, NodeProcess, eventually
from p2pkv.transports.verbs import VerbsTransport
from patience import PATIENCE
from rdma_link import black_hole, n_received
from torn_reads import hunt

_missing = VerbsTransport.unavailable()
pytestmark = pytest.mark.skipif(_missing is not None, reason=f"verbs: {_missing}")

# of which an emulated processor takes the most, over the tearing down of what was not done in time
GRACE = 0.1 * PATIENCE
KEYS = [f"page-{i}" for i in range(32)]
NBYTES = 16384


def fetched(node: NodeProcess, transport: str) -> float:
    """Return how many pages a node has fetched over a transport."""
    counters = node.call("counters")
    return sum(
        n for name, n in counters.items() if name.startswith("p2pkv_fetched_pages") and transport in name
    )


def two_nodes(cluster: Cluster, **settings: object) -> tuple[NodeProcess, NodeProcess]:
    """Start an owner and a reader, each with a device of its own."""
    settings = {"transports": ["verbs"], "deadline": 2.0} | settings
    owner = cluster.start("owner", transport_options={"verbs": {"devices": ["rxe0"]}}, **settings)
    reader = cluster.start("reader", transport_options={"verbs": {"devices": ["rxe1"]}}, **settings)
    cluster.meet(owner, reader)
    publish(owner, reader)
    return owner, reader


def publish(owner: NodeProcess, reader: NodeProcess) -> None:
    """Publish every page, and see to it that the reader's own shard knows where: it is asked first.

    Look-ups wait 20 ms for another process, in which one on an emulated machine may not have answered.
    """

    def is_known() -> bool:
        assert all(owner.call("publish", keys=KEYS, nbytes=NBYTES))
        return bool(reader.call("counters")["p2pkv_shard_entries"] >= len(KEYS))

    eventually(is_known, 30.0)


def all_right(node: NodeProcess, timeout: float = 2.0) -> bool:
    """Fetch every page; whether all were hits. A wrong byte, or a late return, is an error."""
    answer = node.call("fetch", keys=KEYS, nbytes=NBYTES, timeout=timeout)
    assert answer["wrong"] == []
    assert answer["seconds"] < timeout + GRACE
    if not all(answer["hits"]):
        print(
            {name: n for name, n in node.call("counters").items() if "missed" in name or "fallbacks" in name}
        )
    return all(answer["hits"])


@pytest.mark.rdma_slow
def test_pages_cross_from_one_device_to_the_other(cluster: Cluster) -> None:
    _, reader = two_nodes(cluster)
    before = n_received("rxe1")
    eventually(lambda: all_right(reader), 20.0)
    assert fetched(reader, "verbs") >= len(KEYS)
    assert n_received("rxe1") - before >= len(KEYS) * NBYTES / 4096


@pytest.mark.rdma_slow
def test_an_owner_that_stops_or_dies_costs_misses_within_the_deadline(cluster: Cluster) -> None:
    owner, reader = two_nodes(cluster)
    eventually(lambda: all_right(reader), 20.0)
    owner.stop()
    began = time.monotonic()
    while time.monotonic() - began < 2.0:
        all_right(reader, 0.5)
    owner.resume()
    eventually(lambda: all_right(reader, 1.0), 10.0)
    owner.kill()
    began = time.monotonic()
    while time.monotonic() - began < 4.0:
        all_right(reader, 0.5)
    eventually(lambda: len(reader.call("members")) == 1, 10.0)
    assert all(reader.call("publish", keys=KEYS, nbytes=NBYTES))
    assert all_right(reader)


@pytest.mark.rdma_slow
def test_a_peer_that_verbs_does_not_reach_is_read_over_tcp(cluster: Cluster) -> None:
    with black_hole("veth1", "10.77.0.1"):
        _, reader = two_nodes(cluster, transports=["verbs", "tcp"])
        eventually(lambda: all_right(reader), 20.0)
        assert fetched(reader, "tcp") >= len(KEYS)
        assert fetched(reader, "verbs") == 0
        counters = reader.call("counters")
        assert counters['p2pkv_transport_fallbacks_total{transport="verbs"}'] == 1


@pytest.mark.rdma_slow
def test_a_rail_that_fails_drops_out_and_comes_back(cluster: Cluster) -> None:
    settings = {"transports": ["verbs"], "deadline": 2.0}
    # one lane stays within rxe0, the other goes over the cable
    owner = cluster.start("owner", transport_options={"verbs": {"devices": ["rxe0", "rxe0"]}}, **settings)
    reader = cluster.start("reader", transport_options={"verbs": {"devices": ["rxe0", "rxe1"]}}, **settings)
    cluster.meet(owner, reader)
    publish(owner, reader)

    def both_carry() -> bool:
        before = n_received("rxe0"), n_received("rxe1")
        if not all_right(reader):
            return False
        quarter = len(KEYS) * NBYTES / 4096 / 4
        return n_received("rxe0") - before[0] > quarter and n_received("rxe1") - before[1] > quarter

    eventually(both_carry, 20.0)
    with black_hole("veth1", "10.77.0.1"):
        for _ in range(5):
            assert all_right(reader), "the other rail is there"
        assert not both_carry()
    eventually(both_carry, 60.0)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("hits", [5_000, pytest.param(20_000, marks=pytest.mark.rdma_slow)])
def test_no_hit_is_ever_wrong(cluster: Cluster, tmp_path: Path, hits: int) -> None:
    seconds = hits / 100.0 * PATIENCE
    n_hits, n_wrong = hunt(cluster, tmp_path, "verbs", [16 << 10], hits=hits, seconds=seconds, batch=64)
    assert n_wrong == 0
    assert n_hits >= hits, "too few hits to prove anything"


@pytest.mark.rdma_slow
def test_the_hunt_finds_what_a_broken_safeguard_lets_through(cluster: Cluster, tmp_path: Path) -> None:
    _, n_wrong = hunt(
        cluster, tmp_path, "verbs", [16 << 10, 256 << 10], hits=10**9, seconds=80.0, sabotage="unvalidated"
    )
    assert n_wrong > 0
