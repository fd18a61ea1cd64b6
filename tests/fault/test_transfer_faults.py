"""Transfers with peers that die, stop or hold their GIL: they cost their own requests only, by the deadline.

To start a node takes longer than most of what is tested here, so the tests share theirs and start anew what one of them
has killed. Each finds all its nodes alive and known to each other, and names its requests after itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

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


class Nodes:
    """Node processes, started when they are first asked for."""

    def __init__(self) -> None:
        self._clusters: dict[str, Cluster] = {}
        self._running: dict[tuple[str, str], NodeProcess] = {}

    def __call__(self, *names: str, transport: str = "tcp", **config: object) -> list[NodeProcess]:
        """Return the nodes of these names over one transport; ``config`` is for those that are started now."""
        cluster = self._clusters.setdefault(transport, Cluster())
        missing = [name for name in names if (transport, name) not in self._running]
        started = [
            cluster.spawn(name, readable=True, transports=[transport], **config)  # type: ignore[arg-type]
            for name in missing
        ]
        for node in started:
            node.send("start", **node.settings)
        for name, node in zip(missing, started, strict=True):
            node.answer()
            self._running[transport, name] = node
        wanted = [self._running[transport, name] for name in names]
        cluster.meet(*wanted)
        return wanted

    def kill(self, node: NodeProcess) -> None:
        """Kill a node; whoever asks for it next has a new one of the same name."""
        node.kill()
        (key,) = (key for key, running in self._running.items() if running is node)
        del self._running[key]

    def close(self) -> None:
        for cluster in self._clusters.values():
            cluster.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.close()


def hand_over(producer: NodeProcess, consumer: NodeProcess, request: str, seed: int = 1) -> None:
    """Put rows into a grant, and check every byte."""
    consumer.call("grant", request=request, timeout=60.0, **ROWS)
    for _ in range(10):  # a put is given a second to connect, which a busy machine may not have
        producer.call("offer", request=request, seed=seed, to=consumer.node_id, **ROWS)
        if producer.call("wait", request=request, timeout=60.0)["statuses"] != ["PEER_LOST"]:
            break
    got = consumer.call("wait", request=request, timeout=60.0, seed=seed, nbytes=NBYTES)
    assert got["statuses"] == ["OK"]
    assert got["wrong"] == 0


@pytest.mark.parametrize("transport", ["tcp", SLOW_UCX])
def test_a_killed_producer_is_lost_and_the_next_one_is_used(nodes: Nodes, transport: str) -> None:
    producer, other, consumer = nodes("producer", "other", "consumer", transport=transport)
    hand_over(producer, consumer, "killed producer, before")
    # Of the first request rows may be there already when the producer dies; the second is never offered.
    consumer.call("grant", request="killed producer, under way", timeout=10.0, source="producer", **ROWS)
    producer.send("offer", request="killed producer, under way", seed=1, **ROWS)
    nodes.kill(producer)
    got = consumer.call("wait", request="killed producer, under way", timeout=10.0, seed=1, nbytes=NBYTES)
    assert got["wrong"] == 0
    assert got["statuses"] in (["PEER_LOST"], ["OK"])
    assert got["seconds"] < 5.0
    hand_over(other, consumer, "killed producer, after", seed=2)
    again, _ = nodes("producer", "consumer", transport=transport)
    hand_over(again, consumer, "killed producer, again", seed=3)


def test_a_stopped_producer_costs_its_requests_by_their_deadline(nodes: Nodes) -> None:
    producer, other, consumer = nodes("producer", "other", "consumer")
    hand_over(producer, consumer, "stopped producer, before")
    hand_over(other, consumer, "stopped producer, other before")
    producer.call("offer", request="stopped producer, offered", seed=1, **ROWS)
    producer.stop()
    for request in ("stopped producer, offered", "stopped producer, not offered"):
        consumer.call("grant", request=request, timeout=0.5, source="producer", **ROWS)
        got = consumer.call("wait", request=request, timeout=10.0, seed=1, nbytes=NBYTES)
        assert got["statuses"] in (["TIMED_OUT"], ["PEER_LOST"])
        assert got["seconds"] < 0.5 + GRACE
    hand_over(other, consumer, "stopped producer, meanwhile", seed=2)
    producer.resume()
    producer.call("withdraw", request="stopped producer, offered")
    nodes("producer", "consumer")
    hand_over(producer, consumer, "stopped producer, after", seed=3)


def test_a_killed_receiver_is_lost(nodes: Nodes) -> None:
    producer, consumer = nodes("producer", "consumer")
    hand_over(producer, consumer, "killed receiver, before")
    consumer.stop()
    producer.call("offer", request="killed receiver, under way", seed=1, to="consumer", **ROWS)
    nodes.kill(consumer)
    assert producer.call("wait", request="killed receiver, under way", timeout=10.0)["statuses"] == [
        "PEER_LOST"
    ]
    _, again = nodes("producer", "consumer")
    hand_over(producer, again, "killed receiver, again", seed=2)


def test_a_stopped_receiver_finds_a_withdrawn_offer_rejected(nodes: Nodes) -> None:
    producer, consumer = nodes("producer", "consumer")
    hand_over(producer, consumer, "stopped receiver, before")
    consumer.call("grant", request="stopped receiver, late", timeout=20.0, **ROWS)
    consumer.stop()
    producer.call("offer", request="stopped receiver, late", seed=1, to="consumer", lease=0.5, **ROWS)
    put = producer.call("wait", request="stopped receiver, late", timeout=10.0)
    assert put["statuses"] == ["TIMED_OUT"]
    assert put["seconds"] < 0.5 + 2 * GRACE
    producer.call("offer", request="stopped receiver, something else", seed=2, **ROWS)  # over the same memory
    consumer.resume()
    got = consumer.call("wait", request="stopped receiver, late", timeout=10.0, seed=1, nbytes=NBYTES)
    assert "OK" not in got["statuses"]
    assert got["wrong"] == 0
    producer.call("withdraw", request="stopped receiver, something else")
    nodes("producer", "consumer")
    hand_over(producer, consumer, "stopped receiver, after", seed=3)


@pytest.mark.parametrize("transport", ["tcp", SLOW_UCX])
def test_transfers_go_on_while_either_side_holds_its_gil(nodes: Nodes, transport: str) -> None:
    producer, consumer = nodes("producer", "consumer", transport=transport)
    hand_over(producer, consumer, "gil, before")  # the first connection of a pair takes both interpreters
    seconds = 1.5

    consumer.call("grant", request="gil, receiver busy", timeout=10.0, **ROWS)
    consumer.send("hold_gil", seconds=seconds)
    assert consumer.answer()["holding"]
    began = time.monotonic()
    producer.call("offer", request="gil, receiver busy", seed=1, to="consumer", **ROWS)
    assert producer.call("wait", request="gil, receiver busy", timeout=10.0)["statuses"] == ["OK"]
    assert time.monotonic() - began < seconds
    assert consumer.answer() >= seconds
    got = consumer.call("wait", request="gil, receiver busy", timeout=0.0, seed=1, nbytes=NBYTES)
    assert got["statuses"] == ["OK"]
    assert got["wrong"] == 0

    producer.call("offer", request="gil, producer busy", seed=2, **ROWS)
    producer.send("hold_gil", seconds=seconds)
    assert producer.answer()["holding"]
    began = time.monotonic()
    consumer.call("grant", request="gil, producer busy", timeout=10.0, source="producer", **ROWS)
    got = consumer.call("wait", request="gil, producer busy", timeout=10.0, seed=2, nbytes=NBYTES)
    assert got["statuses"] == ["OK"]
    assert got["wrong"] == 0
    assert time.monotonic() - began < seconds
    assert producer.answer() >= seconds
    assert producer.call("wait", request="gil, producer busy", timeout=0.0)["statuses"] == ["OK"]


def test_offers_of_a_dead_producer_do_not_stay_with_the_receiver(nodes: Nodes) -> None:
    producer, consumer = nodes("producer", "consumer without a buffer", buffer_size=0)
    producer.call("offer", request="dead producer, parked", seed=1, to=consumer.node_id, **ROWS)
    eventually(lambda: consumer.call("counters")["p2pkv_parked_offers_total"] == 1, 5.0)
    nodes.kill(producer)
    eventually(lambda: consumer.call("counters")["p2pkv_transfer_links"] == 0, 5.0)
    consumer.call("grant", request="dead producer, parked", timeout=0.3, **ROWS)
    assert consumer.call("wait", request="dead producer, parked", timeout=5.0)["statuses"] == ["TIMED_OUT"]
