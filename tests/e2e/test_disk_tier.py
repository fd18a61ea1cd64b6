"""The disk tier from end to end: what the pool evicted is fetched, by its owner and by a peer, after a restart too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Cluster, NodeProcess, eventually
from p2pkv.testing.processes import RefusedError

NBYTES = 64 << 10
N = 16
POOL = 4 << 20
N_BATCHES = 16  # four times the pool

LAYOUT = ["bucket", "file", "offset"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(pool_size=POOL, namespace="disk", deadline=2.0) as cluster:
        yield cluster


def start_owner(cluster: Cluster, folder: Path, **config: object) -> NodeProcess:
    settings = {"disk_path": str(folder), "disk_size": "128MiB"} | config
    return cluster.start("owner", **settings)


def batches(n: int = N_BATCHES) -> list[list[str]]:
    return [[f"{batch}-{page}" for page in range(N)] for batch in range(n)]


def counter(node: NodeProcess, name: str) -> float:
    return float(node.call("counters").get(name, 0))


def publish_all(owner: NodeProcess, keys: list[list[str]]) -> None:
    """Publish what is too much for the pool, waiting for the disk only so that none of it is left out."""
    for batch in keys:
        assert owner.call("publish", keys=batch, nbytes=NBYTES) == [1] * N
        eventually(lambda: counter(owner, "p2pkv_disk_queued_bytes") == 0, 10.0)
    eventually(lambda: counter(owner, "p2pkv_disk_pages") == N * len(keys), 10.0)


def fetched(node: NodeProcess, keys: list[list[str]], timeout: float = 10.0) -> int:
    """Fetch everything once; return the hits. A wrong byte fails."""
    n_hits = 0
    for batch in keys:
        answer = node.call("fetch", keys=batch, nbytes=NBYTES, timeout=timeout)
        assert answer["wrong"] == []
        assert answer["seconds"] < timeout + 0.1
        n_hits += sum(answer["hits"])
    return n_hits


@pytest.mark.parametrize("layout", LAYOUT)
def test_four_times_the_pool_is_fetched_by_owner_and_reader(
    cluster: Cluster, tmp_path: Path, layout: str
) -> None:
    owner = start_owner(cluster, tmp_path / "disk", disk_layout=layout)
    reader = cluster.start("reader")
    cluster.meet(owner, reader)
    keys = batches()
    publish_all(owner, keys)
    assert fetched(owner, keys) == N * N_BATCHES
    eventually(lambda: all(all(reader.call("exists", keys=batch)["hits"]) for batch in keys), 10.0)
    assert fetched(reader, keys) == N * N_BATCHES
    assert counter(owner, 'p2pkv_fetched_pages_total{source="disk"}') > 0
    assert counter(owner, "p2pkv_promoted_pages_total") > 0


def test_readers_give_their_pins_back(cluster: Cluster, tmp_path: Path) -> None:
    owner = start_owner(cluster, tmp_path / "disk")
    reader = cluster.start("reader")
    cluster.meet(owner, reader)
    keys = batches()
    publish_all(owner, keys)
    eventually(lambda: all(all(reader.call("exists", keys=batch)["hits"]) for batch in keys), 10.0)
    assert fetched(reader, keys, timeout=60.0) == N * N_BATCHES
    # long before the leases of a minute would have ended
    eventually(lambda: counter(owner, "p2pkv_pool_pinned_bytes") == 0, 10.0)


@pytest.mark.parametrize("layout", LAYOUT)
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_restarted_node_serves_its_disk_under_its_new_boot(
    cluster: Cluster, tmp_path: Path, layout: str, end: str
) -> None:
    owner = start_owner(cluster, tmp_path / "disk", disk_layout=layout)
    reader = cluster.start("reader")
    cluster.meet(owner, reader)
    keys = batches()
    publish_all(owner, keys)
    if end == "closed":
        owner.call("close")
    owner.kill()
    again = start_owner(cluster, tmp_path / "disk", disk_layout=layout)
    cluster.meet(again, reader)
    eventually(lambda: all(all(reader.call("exists", keys=batch)["hits"]) for batch in keys), 10.0)
    assert fetched(reader, keys) == N * N_BATCHES
    assert fetched(again, keys) == N * N_BATCHES
    assert counter(again, "p2pkv_disk_recovered_pages_total") == N * N_BATCHES


def test_an_owner_stopped_during_a_promotion_costs_misses_within_the_deadline(
    cluster: Cluster, tmp_path: Path
) -> None:
    owner = start_owner(cluster, tmp_path / "disk")
    reader = cluster.start("reader")
    cluster.meet(owner, reader)
    keys = batches()
    publish_all(owner, keys)
    eventually(lambda: all(all(reader.call("exists", keys=batch)["hits"]) for batch in keys), 10.0)
    owner.stop()
    try:
        assert fetched(reader, keys[:4], timeout=1.0) < 4 * N
    finally:
        owner.resume()


def test_a_change_of_the_ring_tells_the_new_shards_of_pages_on_disk(tmp_path: Path) -> None:
    with Cluster(pool_size=POOL, namespace="disk", deadline=2.0, replicas=1) as cluster:
        owner = start_owner(cluster, tmp_path / "disk")
        keys = batches()
        publish_all(owner, keys)
        # one entry a key, and half of them at the shard of a node that was not there when they were published
        reader = cluster.start("reader")
        cluster.meet(owner, reader)
        eventually(lambda: all(all(reader.call("exists", keys=batch)["hits"]) for batch in keys), 20.0)
        assert fetched(reader, keys) == N * N_BATCHES
        assert counter(reader, "p2pkv_shard_entries") > N * N_BATCHES / 4


def test_a_second_process_on_the_path_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    start_owner(cluster, tmp_path / "disk")
    thief = cluster.spawn("thief", disk_path=str(tmp_path / "disk"), disk_size="128MiB")
    with pytest.raises(RefusedError, match="in use by process"):
        thief.start()


def test_what_was_taken_back_stays_away(cluster: Cluster, tmp_path: Path) -> None:
    owner = start_owner(cluster, tmp_path / "disk")
    keys = batches(4)
    publish_all(owner, keys)
    assert sum(owner.call("retract", keys=keys[0])) == N
    assert fetched(owner, keys[:1]) == 0
    assert fetched(owner, keys[1:]) == 3 * N
    owner.call("clear")
    assert fetched(owner, keys) == 0
    eventually(lambda: counter(owner, "p2pkv_disk_pages") == 0, 10.0)
    owner.call("close")
    owner.kill()
    again = start_owner(cluster, tmp_path / "disk")
    eventually(lambda: not any(again.call("exists", keys=keys[0])["hits"]), 5.0)
    assert fetched(again, keys) == 0


@pytest.mark.parametrize("policy", [{"disk_write": "on_evict"}, {"disk_admission": "second_use"}])
def test_every_policy_keeps_what_it_promises(
    cluster: Cluster, tmp_path: Path, policy: dict[str, str]
) -> None:
    owner = start_owner(cluster, tmp_path / "disk", **policy)
    keys = batches()
    for batch in keys:
        for _ in range(2):  # the second is the use that admits
            assert owner.call("publish", keys=batch, nbytes=NBYTES) == [1] * N
        # publishing slower than the disk writes, which is what these are made for
        time.sleep(0.05)
        eventually(lambda: counter(owner, "p2pkv_disk_queued_bytes") == 0, 20.0)
    assert fetched(owner, keys) == N * N_BATCHES


def test_a_first_use_is_not_written(cluster: Cluster, tmp_path: Path) -> None:
    owner = start_owner(cluster, tmp_path / "disk", disk_admission="second_use")
    for batch in batches(4):
        owner.call("publish", keys=batch, nbytes=NBYTES)
    assert counter(owner, "p2pkv_disk_stored_pages_total") == counter(owner, "p2pkv_disk_queued_bytes") == 0
