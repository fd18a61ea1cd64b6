"""Nodes in processes of their own: what one publishes any other fetches, byte for byte."""

from __future__ import annotations

import pytest

from cluster import Cluster, all_are_fetched, eventually
from p2pkv.testing.ports import free_port
from p2pkv.testing.processes import RefusedError

KEYS = [f"page-{i}" for i in range(32)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("nbytes", [4096, 65536, 96 * 1024])
def test_pages_move_between_processes(cluster: Cluster, transport: str, nbytes: int) -> None:
    owner = cluster.start("owner", transports=[transport])
    reader = cluster.start("reader", transports=[transport])
    assert owner.call("publish", keys=KEYS, nbytes=nbytes) == [1] * len(KEYS)
    # the first look-up makes connections, and an owner that is silent meanwhile costs a miss
    eventually(lambda: reader.call("exists", keys=[*KEYS, "other"])["hits"] == [1] * len(KEYS) + [0], 10.0)
    answer = reader.call("fetch", keys=["other", *KEYS], nbytes=nbytes)
    assert answer["hits"] == [0] + [1] * len(KEYS)
    assert answer["wrong"] == []
    counters = reader.call("counters")
    assert counters[f'p2pkv_fetched_bytes_total{{source="{transport}"}}'] == len(KEYS) * nbytes


def test_a_batch_comes_from_all_its_owners_at_once(cluster: Cluster) -> None:
    owners = [cluster.start(f"owner-{i}") for i in range(3)]
    reader = cluster.start("reader")
    cluster.meet(*owners, reader)
    for i, owner in enumerate(owners):
        assert all(owner.call("publish", keys=KEYS[i::3], nbytes=65536))
    assert reader.call("fetch", keys=KEYS, nbytes=65536)["hits"] == [1] * len(KEYS)
    for node in owners:
        answer = node.call("fetch", keys=KEYS, nbytes=65536)
        assert answer["hits"] == [1] * len(KEYS)
        assert answer["wrong"] == []


def test_a_node_finds_its_own_pages_without_asking_anybody(cluster: Cluster) -> None:
    node = cluster.start("alone")
    assert all(node.call("publish", keys=KEYS, nbytes=4096))
    answer = node.call("fetch", keys=KEYS, nbytes=4096)
    assert answer["hits"] == [1] * len(KEYS)
    assert answer["wrong"] == []


def test_a_later_node_joins_through_any_live_one_and_finds_what_was_there(cluster: Cluster) -> None:
    first = cluster.start("first")
    second = cluster.start("second")
    assert all(first.call("publish", keys=KEYS, nbytes=4096))
    first_address = second.call("members")
    assert {member["node_id"] for member in first_address} == {"first", "second"}
    third = cluster.start("third")
    assert third.call("fetch", keys=KEYS, nbytes=4096)["hits"] == [1] * len(KEYS)


def test_entries_move_when_the_ring_changes(cluster: Cluster) -> None:
    owner = cluster.start("owner", replicas=1)
    assert all(owner.call("publish", keys=KEYS, nbytes=4096))
    others = [cluster.start(f"other-{i}", replicas=1) for i in range(3)]
    cluster.meet(owner, *others)
    for node in others:
        eventually(lambda node=node: all(node.call("exists", keys=KEYS)["hits"]), 10.0)


def test_what_is_evicted_is_a_miss_and_no_longer_in_the_directory(cluster: Cluster) -> None:
    owner = cluster.start("owner", pool_size="1MiB")
    reader = cluster.start("reader")
    for i in range(0, 32, 8):
        assert all(owner.call("publish", keys=KEYS[i : i + 8], nbytes=65536))
    eventually(lambda: sum(reader.call("exists", keys=KEYS)["hits"]) <= 16, 5.0)
    answer = reader.call("fetch", keys=KEYS, nbytes=65536)
    assert answer["hits"][:16] == [0] * 16
    assert sum(answer["hits"]) > 0
    assert answer["wrong"] == []


def test_a_batch_larger_than_the_pool_keeps_its_beginning(cluster: Cluster) -> None:
    node = cluster.start("node", pool_size="1MiB")
    outcomes = node.call("publish", keys=KEYS, nbytes=65536)
    n_kept = sum(outcomes)
    assert 8 <= n_kept <= 16
    assert outcomes == [1] * n_kept + [0] * (len(KEYS) - n_kept)
    answer = node.call("fetch", keys=KEYS, nbytes=65536)
    assert answer["hits"] == outcomes
    assert answer["wrong"] == []


def test_a_second_live_node_of_one_id_is_refused(cluster: Cluster) -> None:
    cluster.start("same")
    second = cluster.spawn("same")
    with pytest.raises(RefusedError) as refused:
        second.start()
    assert refused.value.args[0] == "DuplicateNodeError"
    assert "'same'" in refused.value.args[1]


def test_a_restarted_node_has_a_higher_boot_epoch_and_serves_again(cluster: Cluster) -> None:
    reader = cluster.start("reader")
    first = cluster.start("owner")
    before = {m["node_id"]: m["boot_epoch"] for m in reader.call("members")}
    assert all(first.call("publish", keys=KEYS, nbytes=4096))
    first.kill()
    second = cluster.start("owner")
    after = {m["node_id"]: m["boot_epoch"] for m in second.call("members")}
    assert after["owner"] > before["owner"]
    assert second.call("fetch", keys=KEYS, nbytes=4096)["hits"] == [0] * len(KEYS)
    assert all(second.call("publish", keys=KEYS, nbytes=4096))
    answer = reader.call("fetch", keys=KEYS, nbytes=4096)
    assert answer["hits"] == [1] * len(KEYS)
    assert answer["wrong"] == []


def test_a_node_that_leaves_is_gone_at_once(cluster: Cluster) -> None:
    reader = cluster.start("reader")
    owner = cluster.start("owner")
    assert all(owner.call("publish", keys=KEYS, nbytes=4096))
    owner.call("close")
    eventually(lambda: len(reader.call("members")) == 1, 1.0)
    assert sum(reader.call("exists", keys=KEYS)["hits"]) == 0


def test_static_membership_serves_the_nodes_it_names() -> None:
    with Cluster() as cluster:
        addresses = [cluster.join, f"127.0.0.1:{free_port()}"]
        settings = {"membership": "static", "join": addresses}
        nodes = [
            cluster.spawn(f"node-{i}", listen=address, **settings) for i, address in enumerate(addresses)
        ]
        for node in nodes:
            node.send("start", **node.settings)
        for node in nodes:
            node.answer()
        cluster.meet(*nodes)
        assert all(nodes[0].call("publish", keys=KEYS, nbytes=4096))
        all_are_fetched(nodes[1], KEYS, 4096)
