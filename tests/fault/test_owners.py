"""Owners that die, stop, or hold their GIL: others miss at worst, and never wait past their deadline."""

from __future__ import annotations

import time

import pytest

from cluster import UCX, Cluster, NodeProcess, all_are_fetched, eventually

GRACE = 0.1
KEYS = [f"page-{i}" for i in range(64)]
NBYTES = 65536


def trio(cluster: Cluster, **settings: object) -> tuple[NodeProcess, NodeProcess, NodeProcess]:
    nodes = tuple(cluster.start(name, **settings) for name in ("owner", "reader", "survivor"))
    cluster.meet(*nodes)
    return nodes  # type: ignore[return-value]


def states(node: NodeProcess) -> dict[str, str]:
    return {member["node_id"]: member["state"] for member in node.call("members")}


@pytest.mark.parametrize("transport", ["shm", "tcp", UCX])
def test_a_killed_owner_costs_misses_only(cluster: Cluster, transport: str) -> None:
    owner, reader, survivor = trio(cluster, transports=[transport])
    assert all(owner.call("publish", keys=KEYS, nbytes=NBYTES))
    all_are_fetched(reader, KEYS, NBYTES)
    began = time.monotonic()
    owner.kill()
    while time.monotonic() - began < 3.0:
        answer = reader.call("fetch", keys=KEYS, nbytes=NBYTES, timeout=0.5)
        assert answer["wrong"] == []
        assert answer["seconds"] < 0.5 + GRACE
        answer = reader.call("exists", keys=KEYS, timeout=0.5)
        assert answer["seconds"] < 0.5 + GRACE
    for node in (reader, survivor):
        eventually(lambda node=node: "owner" not in states(node), 10.0)
    assert sum(reader.call("exists", keys=KEYS)["hits"]) == 0
    assert all(survivor.call("publish", keys=KEYS, nbytes=NBYTES))
    for node in (reader, survivor):
        all_are_fetched(node, KEYS, NBYTES)


def test_a_dead_node_is_noticed_within_three_seconds(cluster: Cluster) -> None:
    owner, reader, survivor = trio(cluster)
    for node in (reader, survivor):
        node.call("watch")
    began = time.monotonic()
    owner.kill()
    for node in (reader, survivor):
        eventually(lambda node=node: "owner" not in states(node), 10.0)
        assert time.monotonic() - began < 3.0 + node.call("late")


@pytest.mark.parametrize("transport", ["shm", "tcp", UCX])
def test_a_stopped_owner_holds_nobody_up(cluster: Cluster, transport: str) -> None:
    owner, reader, survivor = trio(cluster, transports=[transport])
    mine = [f"mine-{i}" for i in range(16)]
    assert all(owner.call("publish", keys=KEYS, nbytes=NBYTES))
    assert all(survivor.call("publish", keys=mine, nbytes=NBYTES))
    all_are_fetched(reader, [*KEYS[:8], *mine], NBYTES)
    owner.stop()
    began = time.monotonic()
    while time.monotonic() - began < 3.0:
        answer = reader.call("fetch", keys=KEYS, nbytes=NBYTES, timeout=0.4)
        assert answer["seconds"] < 0.4 + GRACE
        assert answer["wrong"] == []
        answer = reader.call("fetch", keys=mine, nbytes=NBYTES, timeout=2.0)
        assert all(answer["hits"]), "pages of a healthy owner were missed"
        assert answer["seconds"] < 0.4, "a call that does not touch the stopped owner was slow"
        answer = reader.call("exists", keys=KEYS, timeout=0.4)
        assert answer["seconds"] < 0.4 + GRACE
    owner.resume()
    eventually(lambda: states(reader).get("owner") == "ALIVE", 5.0)
    eventually(lambda: all(reader.call("fetch", keys=KEYS, nbytes=NBYTES)["hits"]), 5.0)


@pytest.mark.parametrize("transport", ["shm", "tcp", UCX])
def test_an_owner_whose_gil_is_held_serves_and_is_not_suspected(cluster: Cluster, transport: str) -> None:
    owner, reader, survivor = trio(cluster, transports=[transport])
    assert all(owner.call("publish", keys=KEYS, nbytes=NBYTES))
    owner.send("hold_gil", seconds=10.0)
    assert owner.answer() == {"holding": True}
    # Neither has read from it before: look-up, handshake, token and data are all asked of it now. A newcomer too.
    newcomer = cluster.start("newcomer", transports=[transport])
    until = time.monotonic() + 8.0
    while time.monotonic() < until:
        for node in (reader, survivor, newcomer):
            answer = node.call("fetch", keys=KEYS, nbytes=NBYTES, timeout=2.0)
            assert all(answer["hits"])
            assert answer["wrong"] == []
            assert states(node)["owner"] == "ALIVE"
    assert owner.answer() >= 9.9
    # It overslept its own rounds, and must not blame the others for it.
    known = states(owner)
    assert [known[name] for name in ("owner", "reader", "survivor")] == ["ALIVE"] * 3
    eventually(lambda: states(owner).get("newcomer") == "ALIVE", 3.0)


def test_readers_killed_in_the_middle_leave_the_owner_as_it_was(cluster: Cluster) -> None:
    owner = cluster.start("owner", transports=["tcp"])
    assert all(owner.call("publish", keys=KEYS, nbytes=NBYTES))
    for i in range(5):
        reader = cluster.start(f"reader-{i}", transports=["tcp"])
        reader.send("fetch", keys=KEYS, nbytes=NBYTES)
        reader.kill()
    last = cluster.start("last", transports=["tcp"])
    # Until the dead readers are noticed, entries that moved to them are missed.
    eventually(lambda: all(last.call("fetch", keys=KEYS, nbytes=NBYTES)["hits"]), 5.0)
    assert last.call("fetch", keys=KEYS, nbytes=NBYTES)["wrong"] == []
