"""Transfers with peers that die, stop or hold their GIL: they cost their own requests only, by the deadline."""

from __future__ import annotations

import signal
import time

import pytest

from cluster import Cluster, NodeProcess, eventually
from p2pkv.transports.ucx import UcxTransport

_NO_UCX = UcxTransport.unavailable()
SLOW_UCX = pytest.param(
    "ucx", marks=[pytest.mark.slow, pytest.mark.skipif(_NO_UCX is not None, reason=str(_NO_UCX))]
)
GRACE = 0.1
N, NBYTES = 64, 65536
ROWS = {"n": N, "nbytes": NBYTES}


def nodes(cluster: Cluster, *names: str, transport: str = "tcp") -> list[NodeProcess]:
    started = [cluster.start(name, readable=True, transports=[transport]) for name in names]
    cluster.meet(*started)
    return started


def hand_over(producer: NodeProcess, consumer: NodeProcess, request: str, seed: int = 1) -> None:
    """Put rows into a grant, and check every byte."""
    consumer.call("grant", request=request, timeout=10.0, **ROWS)
    producer.call("offer", request=request, seed=seed, to=consumer.node_id, **ROWS)
    got = consumer.call("wait", request=request, timeout=10.0, seed=seed, nbytes=NBYTES)
    assert got["statuses"] == ["OK"]
    assert got["wrong"] == 0


@pytest.mark.parametrize("transport", ["tcp", SLOW_UCX])
def test_a_killed_producer_is_lost_and_the_next_one_is_used(cluster: Cluster, transport: str) -> None:
    producer, other, consumer = nodes(cluster, "producer", "other", "consumer", transport=transport)
    hand_over(producer, consumer, "before")
    # Of the first request rows may be there already when the producer dies; the second is never offered.
    consumer.call("grant", request="under way", timeout=10.0, source="producer", **ROWS)
    producer.send("offer", request="under way", seed=1, **ROWS)
    producer.kill()
    got = consumer.call("wait", request="under way", timeout=10.0, seed=1, nbytes=NBYTES)
    assert got["wrong"] == 0
    assert got["statuses"] in (["PEER_LOST"], ["OK"])
    assert got["seconds"] < 5.0
    hand_over(other, consumer, "after", seed=2)
    (again,) = nodes(cluster, "producer", transport=transport)
    cluster.meet(again, consumer)
    hand_over(again, consumer, "again", seed=3)


def test_a_stopped_producer_costs_its_requests_by_their_deadline(cluster: Cluster) -> None:
    producer, other, consumer = nodes(cluster, "producer", "other", "consumer")
    hand_over(producer, consumer, "before")
    hand_over(other, consumer, "other before")
    producer.call("offer", request="offered", seed=1, **ROWS)
    producer.signal(signal.SIGSTOP)
    for request in ("offered", "not offered"):
        consumer.call("grant", request=request, timeout=0.5, source="producer", **ROWS)
        got = consumer.call("wait", request=request, timeout=10.0, seed=1, nbytes=NBYTES)
        assert got["statuses"] in (["TIMED_OUT"], ["PEER_LOST"])
        assert got["seconds"] < 0.5 + GRACE
    hand_over(other, consumer, "meanwhile", seed=2)
    producer.signal(signal.SIGCONT)
    producer.call("withdraw", request="offered")
    cluster.meet(producer, consumer)
    hand_over(producer, consumer, "after", seed=3)


def test_a_killed_receiver_is_lost(cluster: Cluster) -> None:
    producer, consumer = nodes(cluster, "producer", "consumer")
    hand_over(producer, consumer, "before")
    consumer.signal(signal.SIGSTOP)
    producer.call("offer", request="under way", seed=1, to="consumer", **ROWS)
    consumer.kill()
    assert producer.call("wait", request="under way", timeout=10.0)["statuses"] == ["PEER_LOST"]
    (again,) = nodes(cluster, "consumer")
    cluster.meet(producer, again)
    hand_over(producer, again, "again", seed=2)


def test_a_stopped_receiver_finds_a_withdrawn_offer_rejected(cluster: Cluster) -> None:
    producer, consumer = nodes(cluster, "producer", "consumer")
    hand_over(producer, consumer, "before")
    consumer.call("grant", request="late", timeout=20.0, **ROWS)
    consumer.signal(signal.SIGSTOP)
    producer.call("offer", request="late", seed=1, to="consumer", lease=0.5, **ROWS)
    put = producer.call("wait", request="late", timeout=10.0)
    assert put["statuses"] == ["TIMED_OUT"]
    assert put["seconds"] < 0.5 + 2 * GRACE
    producer.call("offer", request="something else", seed=2, **ROWS)  # over the same memory
    consumer.signal(signal.SIGCONT)
    got = consumer.call("wait", request="late", timeout=10.0, seed=1, nbytes=NBYTES)
    assert "OK" not in got["statuses"]
    assert got["wrong"] == 0
    producer.call("withdraw", request="something else")
    cluster.meet(producer, consumer)
    hand_over(producer, consumer, "after", seed=3)


@pytest.mark.parametrize("transport", ["tcp", SLOW_UCX])
def test_transfers_go_on_while_either_side_holds_its_gil(cluster: Cluster, transport: str) -> None:
    producer, consumer = nodes(cluster, "producer", "consumer", transport=transport)
    hand_over(producer, consumer, "before")  # the first connection of a pair takes both interpreters
    seconds = 1.5

    consumer.call("grant", request="receiver busy", timeout=10.0, **ROWS)
    consumer.send("hold_gil", seconds=seconds)
    assert consumer.answer()["holding"]
    began = time.monotonic()
    producer.call("offer", request="receiver busy", seed=1, to="consumer", **ROWS)
    assert producer.call("wait", request="receiver busy", timeout=10.0)["statuses"] == ["OK"]
    assert time.monotonic() - began < seconds
    assert consumer.answer() >= seconds
    got = consumer.call("wait", request="receiver busy", timeout=0.0, seed=1, nbytes=NBYTES)
    assert got["statuses"] == ["OK"]
    assert got["wrong"] == 0

    producer.call("offer", request="producer busy", seed=2, **ROWS)
    producer.send("hold_gil", seconds=seconds)
    assert producer.answer()["holding"]
    began = time.monotonic()
    consumer.call("grant", request="producer busy", timeout=10.0, source="producer", **ROWS)
    got = consumer.call("wait", request="producer busy", timeout=10.0, seed=2, nbytes=NBYTES)
    assert got["statuses"] == ["OK"]
    assert got["wrong"] == 0
    assert time.monotonic() - began < seconds
    assert producer.answer() >= seconds
    assert producer.call("wait", request="producer busy", timeout=0.0)["statuses"] == ["OK"]


def test_offers_of_a_dead_producer_do_not_stay_with_the_receiver(cluster: Cluster) -> None:
    producer = cluster.start("producer", readable=True, transports=["tcp"])
    consumer = cluster.start("consumer", readable=True, transports=["tcp"], buffer_size=0)
    cluster.meet(producer, consumer)
    producer.call("offer", request="parked", seed=1, to="consumer", **ROWS)
    eventually(lambda: consumer.call("counters")["p2pkv_parked_offers_total"] == 1, 5.0)
    producer.kill()
    eventually(lambda: consumer.call("counters")["p2pkv_transfer_links"] == 0, 5.0)
    consumer.call("grant", request="parked", timeout=0.3, **ROWS)
    assert consumer.call("wait", request="parked", timeout=5.0)["statuses"] == ["TIMED_OUT"]
