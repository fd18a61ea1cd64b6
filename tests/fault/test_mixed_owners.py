"""Fetches from several owners of which one has stopped: the others' pages come, whatever the order of the batch."""

from __future__ import annotations

import pytest

from cluster import Cluster, NodeProcess

GRACE = 0.1
NBYTES = 65536
STOPPED = [f"stopped-{i}" for i in range(16)]
HEALTHY = [f"healthy-{i}" for i in range(16)]
BOTH = [key for pair in zip(STOPPED, HEALTHY, strict=True) for key in pair]


def hits(node: NodeProcess, keys: list[str], timeout: float) -> set[str]:
    """Fetch, check the deadline and every byte, and return the keys that were hits."""
    answer = node.call("fetch", keys=keys, nbytes=NBYTES, timeout=timeout)
    assert answer["wrong"] == []
    assert answer["seconds"] < timeout + GRACE
    return {key for key, hit in zip(keys, answer["hits"], strict=True) if hit}


@pytest.mark.parametrize(("transport", "is_connected"), [("shm", False), ("tcp", False), ("tcp", True)])
def test_a_stopped_owner_costs_its_own_pages_only(
    cluster: Cluster, transport: str, is_connected: bool
) -> None:
    stopped, reader, healthy = (
        cluster.start(name, transports=[transport]) for name in ("stopped", "reader", "healthy")
    )
    cluster.meet(stopped, reader, healthy)
    assert all(stopped.call("publish", keys=STOPPED, nbytes=NBYTES))
    assert all(healthy.call("publish", keys=HEALTHY, nbytes=NBYTES))
    # The directory is asked before: this is about reading.
    assert all(reader.call("exists", keys=BOTH)["hits"])
    if is_connected:
        assert hits(reader, BOTH, 5.0) == set(BOTH)
    stopped.stop()
    assert hits(reader, BOTH, 0.5) >= set(HEALTHY)
    assert hits(reader, BOTH[::-1], 0.5) >= set(HEALTHY), "a healthy owner was taken for a stopped one"
