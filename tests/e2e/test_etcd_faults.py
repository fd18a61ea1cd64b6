"""Nodes over a real etcd of three members, while its leader is killed, it loses its quorum, and nodes die meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Cluster, NodeProcess, eventually
from etcd_servers import EtcdServers, needs_etcd
from p2pkv.testing.processes import RefusedError

pytestmark = [needs_etcd, pytest.mark.xdist_group("etcd-faults")]

NBYTES = 65536
KEYS = [f"page-{i}" for i in range(8)]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServers]:
    servers = EtcdServers(tmp_path)
    yield servers
    servers.close()


def over(etcd: EtcdServers, secret: Path) -> Cluster:
    """Return a cluster of processes that know nothing but etcd."""
    secret.write_text("the secret of a test, long enough")
    secret.chmod(0o600)
    return Cluster(membership=f"{etcd.url}?ttl=10", join=[], secret_file=str(secret))


class Reader(threading.Thread):
    """Fetches all the time; every page has to be a hit, and right."""

    def __init__(self, node: NodeProcess) -> None:
        super().__init__()
        self.node = node
        self.n_fetches = 0
        self.wrong: list[object] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            answer = self.node.call("fetch", keys=KEYS, nbytes=NBYTES)
            self.n_fetches += 1
            if answer["wrong"] or not all(answer["hits"]):
                self.wrong.append(answer)

    def stop(self) -> None:
        self.over.set()
        self.join()
        assert self.wrong == []
        assert self.n_fetches > 10


def kill_leaders(etcd: EtcdServers, secret: Path, n_times: int) -> None:
    """Kill the leader again and again; each time a node dies and another one comes."""
    with over(etcd, secret) as cluster:
        owner, reader, guest = (cluster.start(node_id) for node_id in ("owner", "reader", "g0"))
        cluster.meet(owner, reader, guest)
        assert all(owner.call("publish", keys=KEYS, nbytes=NBYTES))
        thread = Reader(reader)
        thread.start()
        for i in range(1, n_times + 1):
            leader = etcd.leader()
            assert leader is not None
            etcd.kill(leader)
            guest.kill()
            guest = cluster.spawn(f"g{i}")
            etcd.start(leader)
            etcd.await_ready()
            guest.start()
            cluster.meet(owner, guest)
        thread.stop()
        eventually(lambda: owner.call("counters")["p2pkv_registry_up"] == 1, 10.0)
        eventually(lambda: len(alive(owner)) == 3, 10.0)
        # who is suspected is not alive, and not dead yet
        eventually(lambda: deaths(owner) >= n_times, 10.0)
        assert deaths(owner) == n_times, "somebody else died as well"


def test_a_killed_leader_costs_nobody_a_page(etcd: EtcdServers, tmp_path: Path) -> None:
    kill_leaders(etcd, tmp_path / "secret", 3)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_leader_that_is_killed_a_hundred_times_costs_nobody_a_page(
    etcd: EtcdServers, tmp_path: Path
) -> None:
    kill_leaders(etcd, tmp_path / "secret", 100)


def test_without_a_quorum_the_cluster_goes_on_and_deaths_are_found(etcd: EtcdServers, tmp_path: Path) -> None:
    with over(etcd, tmp_path / "secret") as cluster:
        owner, reader, victim = (cluster.start(node_id) for node_id in ("owner", "reader", "victim"))
        cluster.meet(owner, reader, victim)
        assert all(owner.call("publish", keys=KEYS, nbytes=NBYTES))
        etcd.kill(0)
        etcd.pause(1)  # alive, and silent: the worse kind
        thread = Reader(reader)
        thread.start()
        victim.kill()
        eventually(lambda: len(alive(owner)) == 2, 5.0)
        with pytest.raises(RefusedError, match=r"etcd at 127\.0\.0\.1"):
            cluster.start("late")
        eventually(lambda: owner.call("counters")["p2pkv_registry_failures_total"] >= 4, 60.0)
        assert alive(owner) == {"owner", "reader"}
        etcd.resume(1)
        etcd.start(0)
        etcd.await_ready()
        newcomer = cluster.start("newcomer")
        thread.stop()
        cluster.meet(owner, reader, newcomer)


def deaths(node: NodeProcess) -> float:
    found: float = node.call("counters")["p2pkv_membership_deaths_total"]
    return found


def alive(node: NodeProcess) -> set[str]:
    return {member["node_id"] for member in node.call("members") if member["state"] == "ALIVE"}
