"""Owners of directory entries that stop or restart: puts return, look-ups find the other copy, gaps are filled."""

from __future__ import annotations

import time

import pytest

from cluster import Cluster, NodeProcess, all_are_fetched, eventually

GRACE = 0.1
KEYS = [f"entry-{i}" for i in range(200)]
NBYTES = 4096


@pytest.fixture
def trio(cluster: Cluster) -> tuple[NodeProcess, NodeProcess, NodeProcess]:
    """A producer, a reader and a third node: each owns two thirds of the entries."""
    producer, reader, third = (cluster.start(name) for name in ("producer", "reader", "third"))
    cluster.meet(producer, reader, third)
    return producer, reader, third


def publish(node: NodeProcess, keys: list[str], timeout: float = 0.5) -> int:
    began = time.monotonic()
    n_published = sum(node.call("publish", keys=keys, nbytes=NBYTES, timeout=timeout))
    assert time.monotonic() - began < timeout + GRACE + 0.1  # the worker fills the pages first
    return n_published


def entries(node: NodeProcess) -> float:
    return float(node.call("counters")["p2pkv_shard_entries"])


def publish_everywhere(producer: NodeProcess, owner: NodeProcess) -> float:
    """Publish, and wait until ``owner`` has its two thirds of the entries; return how many that are."""
    assert publish(producer, KEYS, 1.0) == len(KEYS)
    eventually(lambda: entries(owner) > 0.5 * len(KEYS), 5.0)
    return entries(owner)


def test_puts_return_while_an_owner_is_stopped_and_it_gets_what_it_missed(
    trio: tuple[NodeProcess, NodeProcess, NodeProcess],
) -> None:
    producer, reader, third = trio
    third.stop()
    # Until it is suspected it is asked and stays silent; afterwards it is not asked. It misses both.
    began = time.monotonic()
    while time.monotonic() - began < 1.8:
        n = int((time.monotonic() - began) * 1000)
        batch = [f"{key}-{n}" for key in KEYS[:20]]
        assert publish(producer, batch) == len(batch)
        answer = reader.call("fetch", keys=batch, nbytes=NBYTES, timeout=0.5)
        assert all(answer["hits"])
        assert answer["wrong"] == []
        assert answer["seconds"] < 0.5 + GRACE
    assert publish(producer, KEYS) == len(KEYS)
    third.resume()
    eventually(lambda: third.call("exists", keys=KEYS)["hits"].count(1) == len(KEYS), 5.0)
    # What it owns is in its own shard again: two thirds of all, and the reader finds it there when the others go.
    eventually(lambda: entries(third) > 0.5 * len(KEYS), 5.0)
    producer_counters = producer.call("counters")
    assert sum(v for k, v in producer_counters.items() if k.startswith("p2pkv_silent_owners")) > 0


def test_a_restarted_owner_is_given_its_entries_again(
    cluster: Cluster, trio: tuple[NodeProcess, NodeProcess, NodeProcess]
) -> None:
    producer, reader, third = trio
    before = publish_everywhere(producer, third)
    third.kill()
    again = cluster.start("third")
    eventually(lambda: entries(again) >= before, 10.0)
    cluster.meet(producer, reader, again)
    for node in (reader, again):
        all_are_fetched(node, KEYS, NBYTES)


def test_entries_are_found_while_any_one_of_their_owners_is_dead(
    trio: tuple[NodeProcess, NodeProcess, NodeProcess],
) -> None:
    producer, reader, third = trio
    publish_everywhere(producer, third)
    third.kill()
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        # A second, of which a dead owner costs 20 ms: a machine that is busy with other things needs some.
        answer = reader.call("fetch", keys=KEYS, nbytes=NBYTES, timeout=1.0)
        assert all(answer["hits"])
        assert answer["wrong"] == []


def test_without_a_second_replica_a_stopped_owner_loses_pages(cluster: Cluster) -> None:
    # The sabotage of the tests above: what keeps pages in reach is the second copy of their entries.
    producer, reader, third = (cluster.start(name, replicas=1) for name in ("producer", "reader", "third"))
    cluster.meet(producer, reader, third)
    assert publish(producer, KEYS, 1.0) == len(KEYS)
    third.stop()
    answer = reader.call("fetch", keys=KEYS, nbytes=NBYTES, timeout=0.3)
    assert answer["wrong"] == []
    assert answer["seconds"] < 0.3 + GRACE
    assert 0 < sum(answer["hits"]) < len(KEYS)
