"""The torn-read hunt: a producer churns fresh pages through a small pool while readers fetch and check every byte.

The slow test finds 100,000 hits in each hunt. With validation on nothing wrong may ever be found; with it off, or with
words that are loaded before the bytes, the same hunt must find wrong bytes: a hunt that finds nothing then proves
nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import UCX, Cluster
from torn_reads import hunt

ONE_GRANULE = [4096]
SEVERAL = [16 << 10]
MIXED = [16 << 10, 24 << 10, 64 << 10, 128 << 10, 256 << 10]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("sizes", [ONE_GRANULE, SEVERAL, MIXED], ids=["one-granule", "several", "mixed"])
def test_no_hit_is_ever_wrong(cluster: Cluster, tmp_path: Path, transport: str, sizes: list[int]) -> None:
    n_hits, n_wrong = hunt(cluster, tmp_path, transport, sizes, hits=4_000, seconds=100.0)
    assert n_wrong == 0
    assert n_hits >= 4_000, "too few hits to prove anything"


def test_no_hit_is_ever_wrong_where_two_threads_copy(cluster: Cluster, tmp_path: Path) -> None:
    n_hits, n_wrong = hunt(cluster, tmp_path, "shm", MIXED, hits=4_000, seconds=100.0, shares_copies=True)
    assert n_wrong == 0
    assert n_hits >= 4_000, "too few hits to prove anything"
    for node in cluster.nodes[1:]:
        assert node.call("counters")['p2pkv_large_copies_total{threads="2"}'] > 100, "nothing was shared"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("sizes", [[24 << 10], MIXED], ids=["one-size", "mixed"])
def test_no_hit_of_packed_pages_is_ever_wrong(
    cluster: Cluster, tmp_path: Path, transport: str, sizes: list[int]
) -> None:
    n_hits, n_wrong = hunt(
        cluster, tmp_path, transport, sizes, hits=4_000, seconds=100.0, compression="lossless"
    )
    assert n_wrong == 0
    assert n_hits >= 4_000, "too few hits to prove anything"
    producer = cluster.nodes[0]
    producer.answer()  # its churn has ended
    assert producer.call("counters")["p2pkv_packed_pages_total"] > 1000, (
        "too few packed pages to prove anything"
    )


@pytest.mark.parametrize("transport", [UCX])
def test_no_hit_is_ever_wrong_over_ucx(cluster: Cluster, tmp_path: Path, transport: str) -> None:
    n_hits, n_wrong = hunt(cluster, tmp_path, transport, SEVERAL, hits=4_000, seconds=100.0)
    assert n_wrong == 0
    assert n_hits >= 4_000, "too few hits to prove anything"


@pytest.mark.parametrize("sizes", [ONE_GRANULE, MIXED], ids=["one-granule", "mixed"])
def test_no_hit_is_wrong_while_pages_go_to_disk_and_back(
    cluster: Cluster, tmp_path: Path, sizes: list[int]
) -> None:
    n_hits, n_wrong = hunt(
        cluster, tmp_path, "shm", sizes, hits=100_000, seconds=12.0, disk=tmp_path / "disk"
    )
    assert n_wrong == 0
    assert n_hits >= 3_000, "too few hits to prove anything"
    producer = cluster.nodes[0]
    producer.answer()  # its churn has ended
    counters = producer.call("counters")
    assert counters["p2pkv_promoted_pages_total"] > 100, "too few promotions to prove anything"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shm", "tcp", UCX])
@pytest.mark.parametrize("sizes", [ONE_GRANULE, SEVERAL, MIXED], ids=["one-granule", "several", "mixed"])
def test_no_hit_is_ever_wrong_in_a_long_hunt(
    cluster: Cluster, tmp_path: Path, transport: str, sizes: list[int]
) -> None:
    n_hits, n_wrong = hunt(cluster, tmp_path, transport, sizes, hits=100_000, seconds=600.0)
    assert n_wrong == 0
    assert n_hits >= 100_000


@pytest.mark.parametrize("transport", ["shm", "tcp", UCX])
@pytest.mark.parametrize("sabotage", ["unvalidated", "words_too_early"])
def test_the_hunt_finds_what_a_broken_safeguard_lets_through(
    cluster: Cluster, tmp_path: Path, transport: str, sabotage: str
) -> None:
    _, n_wrong = hunt(cluster, tmp_path, transport, MIXED, hits=10**9, seconds=80.0, sabotage=sabotage)
    assert n_wrong > 0
