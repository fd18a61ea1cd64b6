"""The hunts for torn pages and rows in device memory: none is wrong, and some are with a safeguard broken."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster, NodeProcess
from fake_cuda import FakeCuda
from torn_reads import hunt
from torn_rows import Churn, hunt_rows

SIZES = [16 << 10, 64 << 10, 256 << 10]
STAGING = 1 << 19
"""Two pages of the largest size to a call: a batch of eight takes several rounds."""


@pytest.fixture
def with_device(kind: str, cuda_settings: dict[str, object]) -> dict[str, Any]:
    """What a reader has beside."""
    return {"device": kind, "device_staging_size": STAGING, **cuda_settings}


@pytest.mark.parametrize(
    ("transport", "direct", "blocks"),
    [("shm", "1GiB", 0), ("shm", "1GiB", 4), ("shm", "0", 0), ("tcp", "1GiB", 4)],
)
def test_no_hit_is_ever_wrong(
    cluster: Cluster, tmp_path: Path, transport: str, direct: str, blocks: int, with_device: dict[str, Any]
) -> None:
    options = with_device | {"device_direct_size": direct, "device_kernel_blocks": blocks}
    n_hits, n_wrong = hunt(
        cluster, tmp_path, transport, SIZES, hits=1_000, seconds=100.0, reader_options=options
    )
    assert n_wrong == 0
    assert n_hits >= 1_000, "too few hits to prove anything"
    of_readers = [node.call("counters") for node in cluster.nodes[1:]]
    n_direct = sum(
        counters['p2pkv_device_direct_bytes_total{direction="to_device"}'] for counters in of_readers
    )
    n_staged = sum(counters['p2pkv_staged_bytes_total{direction="to_device"}'] for counters in of_readers)
    is_direct = (transport, direct) == ("shm", "1GiB")
    assert (n_direct > n_staged) == is_direct, "the pages took another way than the one that is hunted"


@pytest.mark.parametrize(("transport", "direct"), [("shm", "1GiB"), ("tcp", "1GiB"), ("shm", "0")])
def test_no_page_that_a_device_wrote_is_ever_wrong(
    cluster: Cluster, tmp_path: Path, transport: str, direct: str, with_device: dict[str, Any]
) -> None:
    """The producer publishes from a device, and its pool is small: what it writes over others may be reading."""
    options = with_device | {"device_direct_size": direct}
    n_hits, n_wrong = hunt(
        cluster, tmp_path, transport, SIZES, hits=1_000, seconds=100.0, producer_options=options
    )
    assert n_wrong == 0
    assert n_hits >= 1_000, "too few hits to prove anything"
    producer = cluster.nodes[0]
    producer.answer()  # it has stopped publishing
    counters = producer.call("counters")
    ways = ("device_direct", "staged")
    n_direct, n_staged = (counters[f'p2pkv_{way}_bytes_total{{direction="to_host"}}'] for way in ways)
    assert (n_direct > n_staged) == (direct != "0"), "the pages took another way than the one that is hunted"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_no_page_that_a_node_pulled_from_the_staging_of_a_device_is_ever_wrong(
    cluster: Cluster, tmp_path: Path, transport: str, with_device: dict[str, Any]
) -> None:
    """The producer is attached: the staging, which has room for two of the largest pages, is used over and over."""
    n_hits, n_wrong = hunt(
        cluster,
        tmp_path,
        transport,
        SIZES,
        hits=1_000,
        seconds=100.0,
        producer_options=with_device,
        attached=True,
    )
    assert n_wrong == 0
    assert n_hits >= 1_000, "too few hits to prove anything"


@pytest.mark.parametrize("blocks", [0, 4])
def test_no_row_of_another_process_is_ever_wrong_whoever_is_killed(
    cluster: Cluster, tmp_path: Path, kind: str, cuda_settings: dict[str, object], blocks: int
) -> None:
    seen = hunt_rows(
        cluster,
        tmp_path,
        Churn(kind, 16 << 10),
        rows=2_000,
        seconds=100.0,
        n_kills=2,
        seed=random.randrange(2**32),
        settings=cuda_settings | {"device_kernel_blocks": blocks},
    )
    assert not seen.wrong, seen.found
    assert seen.right >= 2_000, "too few rows to prove anything"
    assert set(seen.kills.values()) == {1}
    assert seen.direct_bytes > seen.staged_bytes, "the rows took another way than the one that is hunted"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_no_hit_is_ever_wrong_in_a_long_hunt(
    cluster: Cluster, tmp_path: Path, transport: str, with_device: dict[str, Any]
) -> None:
    n_hits, n_wrong = hunt(
        cluster, tmp_path, transport, SIZES, hits=50_000, seconds=600.0, reader_options=with_device
    )
    assert n_wrong == 0
    assert n_hits >= 50_000


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_the_hunt_finds_what_is_not_validated(
    cluster: Cluster, tmp_path: Path, transport: str, with_device: dict[str, Any]
) -> None:
    _, n_wrong = hunt(
        cluster,
        tmp_path,
        transport,
        SIZES,
        hits=10**9,
        seconds=80.0,
        sabotage="unvalidated",
        reader_options=with_device,
    )
    assert n_wrong > 0


@pytest.mark.slow
def test_the_hunt_finds_copies_that_were_not_waited_for(
    emulated: FakeCuda, cluster: Cluster, tmp_path: Path, with_device: dict[str, Any]
) -> None:
    def believe(reader: NodeProcess) -> None:
        reader.call("believe_lying_events", delay_us=2000)

    _, n_wrong = hunt(
        cluster,
        tmp_path,
        "shm",
        SIZES,
        hits=10**9,
        seconds=80.0,
        reader_options=with_device,
        prepare=believe,
    )
    assert n_wrong > 0
