"""Transfers of device memory with peers that die or stop: they cost their own requests only, by the deadline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster import Cluster, NodeProcess, eventually

GRACE = 0.1
N, NBYTES = 64, 65536
ROWS = {"n": N, "nbytes": NBYTES}
STAGING = 512 * 1024
"""An eighth of a request: it is always between two parts of one that a peer dies."""


@pytest.fixture
def cluster(kind: str, cuda_settings: dict[str, Any]) -> Iterator[Cluster]:
    cluster = Cluster(device_staging_size=STAGING, transports=["tcp"], buffer_size=0, **cuda_settings)
    yield cluster
    cluster.close()


@pytest.fixture
def pair(cluster: Cluster, kind: str) -> list[NodeProcess]:
    """A producer and a consumer, which know each other."""
    nodes = [cluster.spawn(name, device=kind, readable=True) for name in ("producer", "consumer")]
    for node in nodes:
        node.send("start", **node.settings)
    for node in nodes:
        node.answer()
    cluster.meet(*nodes)
    hand_over(*nodes, "before")
    return nodes


def hand_over(producer: NodeProcess, consumer: NodeProcess, request: str, seed: int = 1) -> None:
    """Put rows into a grant, and check every byte."""
    consumer.call("grant", request=request, timeout=10.0, **ROWS)
    producer.call("offer", request=request, seed=seed, to=consumer.node_id, **ROWS)
    got = consumer.call("wait", request=request, timeout=10.0, seed=seed, nbytes=NBYTES)
    assert got["statuses"] == ["OK"]
    assert got["wrong"] == 0


def used(node: NodeProcess, direction: str) -> float:
    return float(node.call("counters")[f"p2pkv_{direction}_staging_used_bytes"])


def test_a_killed_producer_is_lost_and_costs_no_staging(
    cluster: Cluster, kind: str, pair: list[NodeProcess]
) -> None:
    producer, consumer = pair
    consumer.call("grant", request="under way", timeout=10.0, source="producer", **ROWS)
    producer.send("offer", request="under way", seed=1, **ROWS)
    producer.kill()
    got = consumer.call("wait", request="under way", timeout=10.0, seed=1, nbytes=NBYTES)
    assert got["wrong"] == 0
    assert "PEER_LOST" in got["statuses"] or got["statuses"] == ["OK"]
    assert got["seconds"] < 5.0
    eventually(lambda: used(consumer, "incoming") == 0, 5.0)
    again = cluster.start("producer again", device=kind, readable=True)
    cluster.meet(again, consumer)
    hand_over(again, consumer, "after", seed=3)


def test_a_stopped_producer_costs_its_requests_by_their_deadline(pair: list[NodeProcess]) -> None:
    producer, consumer = pair
    producer.call("offer", request="offered", seed=1, **ROWS)
    producer.stop()
    for request in ("offered", "not offered"):
        consumer.call("grant", request=request, timeout=0.5, source="producer", **ROWS)
        got = consumer.call("wait", request=request, timeout=10.0, seed=1, nbytes=NBYTES)
        assert got["statuses"] in (["TIMED_OUT"], ["PEER_LOST"])
        assert got["seconds"] < 0.5 + GRACE
    producer.resume()
    producer.call("withdraw", request="offered")
    eventually(lambda: used(consumer, "incoming") == 0 and used(producer, "outgoing") == 0, 5.0)


def test_a_killed_receiver_gives_its_staging_back(
    cluster: Cluster, kind: str, pair: list[NodeProcess]
) -> None:
    producer, consumer = pair
    consumer.stop()
    producer.call("offer", request="under way", seed=1, to="consumer", **ROWS)
    eventually(lambda: used(producer, "outgoing") > 0, 5.0)
    consumer.kill()
    assert producer.call("wait", request="under way", timeout=10.0)["statuses"] == ["PEER_LOST"]
    eventually(lambda: used(producer, "outgoing") == 0, 5.0)
    again = cluster.start("consumer again", device=kind, readable=True)
    cluster.meet(producer, again)
    hand_over(producer, again, "after", seed=2)


def test_a_stopped_receiver_finds_a_withdrawn_offer_rejected(pair: list[NodeProcess]) -> None:
    producer, consumer = pair
    consumer.call("grant", request="late", timeout=20.0, **ROWS)
    consumer.stop()
    producer.call("offer", request="late", seed=1, to="consumer", lease=0.5, **ROWS)
    put = producer.call("wait", request="late", timeout=10.0)
    assert put["statuses"] == ["TIMED_OUT"]
    assert put["seconds"] < 0.5 + 2 * GRACE
    # over the same memory, and in the same staging
    producer.call("offer", request="something else", seed=2, to="consumer", **ROWS)
    consumer.resume()
    got = consumer.call("wait", request="late", timeout=10.0, seed=1, nbytes=NBYTES)
    assert "OK" not in got["statuses"]
    assert got["wrong"] == 0
    producer.call("withdraw", request="something else")
    eventually(lambda: used(consumer, "incoming") == 0 and used(producer, "outgoing") == 0, 5.0)
