"""What only an engine with a registry does, over the simulated store."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from p2pkv.directory.view import DEFAULT_CLUSTER, Member, State
from p2pkv.errors import DuplicateNodeError, RegistryError
from p2pkv.testing.simulated_cluster import SimulatedCluster
from p2pkv.testing.simulated_registry import (
    TTL,
    SimulatedRegisteredMembership,
    SimulatedRegistry,
    StoreServer,
    server_of,
    simulation_seal,
)


@pytest.fixture
def cluster() -> SimulatedCluster:
    return SimulatedCluster(SimulatedRegisteredMembership)


@pytest.fixture
def server(cluster: SimulatedCluster) -> StoreServer:
    return server_of(cluster.simulation)


@pytest.fixture
def before_a_claim(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have something done when the next node has read the registry, and is about to take its name."""
    claim = SimulatedRegistry.claim

    def plan(do: Callable[[], object]) -> None:
        def do_and_claim(
            self: SimulatedRegistry, value: bytes, over: Collection[bytes], deadline_s: float
        ) -> bytes | None:
            monkeypatch.setattr(SimulatedRegistry, "claim", claim)
            do()
            return claim(self, value, over, deadline_s)

        monkeypatch.setattr(SimulatedRegistry, "claim", do_and_claim)

    return plan


def test_of_two_that_start_in_one_moment_the_second_is_refused(
    cluster: SimulatedCluster, before_a_claim: Callable[[Callable[[], object]], None]
) -> None:
    before_a_claim(lambda: cluster.start("n0", "h1:7000"))
    with pytest.raises(DuplicateNodeError, match="'n0' is in use by a live node at h1:7000"):
        cluster.start("n0", "h0:7000")
    cluster.run(20.0)
    assert cluster.agree()
    assert cluster.nodes["n0"].expulsions == []


def test_a_name_that_was_taken_and_left_in_the_same_moment_is_taken_above(
    cluster: SimulatedCluster, server: StoreServer, before_a_claim: Callable[[Callable[[], object]], None]
) -> None:
    boots = []

    def start_and_die() -> None:
        twin = cluster.start("n0", "h1:7000", wall_offset_ns=2 * 10**18)
        boots.append(twin.engine.boot_epoch)
        cluster.kill(twin)

    before_a_claim(start_and_die)
    node = cluster.start("n0", "h0:7000")
    assert node.engine.boot_epoch == boots[0] + 1
    assert node.network.reply().boot_epoch == node.engine.boot_epoch
    other = cluster.start("n1", "h2:7000")
    cluster.run(2.0)
    assert other.engine.view()["n0"].boot_epoch == node.engine.boot_epoch


def test_an_hour_without_the_store_costs_newcomers_only(
    cluster: SimulatedCluster, server: StoreServer
) -> None:
    nodes = cluster.start_many(4)
    server.is_up = False
    cluster.run(1800.0)
    cluster.kill(nodes[3])
    killed_at = cluster.simulation.now
    cluster.run(1800.0)
    for node in nodes[:3]:
        assert node.state_of("n3") is not State.ALIVE
        assert node.died["n3"] - killed_at <= 3.0
        assert len(node.died) == 1
    with pytest.raises(RegistryError):
        cluster.start("n4", "h4:7000")
    server.is_up = True
    cluster.run(10.0)
    cluster.start("n4", "h4:7000")
    cluster.run(5.0)
    assert cluster.agree()


def test_who_is_cut_off_from_the_store_stays_a_member_and_is_found_again(
    cluster: SimulatedCluster, server: StoreServer
) -> None:
    nodes = cluster.start_many(3)
    server.cut_off.add("n1")
    cluster.run(3 * TTL)
    assert cluster.agree()
    server.expire(cluster.simulation.now)
    assert "n1" not in server.entries
    newcomer = cluster.start("n3", "h3:7000")
    cluster.run(5.0)
    assert newcomer.present() == {"n0", "n1", "n2", "n3"}  # the others told it
    server.cut_off.clear()
    cluster.run(20.0)
    assert "n1" in server.entries
    assert [node.died for node in nodes] == [{}] * 3


def test_an_interpreter_that_is_held_for_longer_than_a_lease_costs_nothing(
    cluster: SimulatedCluster, server: StoreServer
) -> None:
    nodes = cluster.start_many(3)
    changes = [len(node.changes) for node in nodes]
    cluster.simulation.hold_interpreter(nodes[1].network, 2 * TTL)
    cluster.run(2 * TTL - 1)
    assert "n1" not in server.entries
    cluster.run(TTL)
    assert "n1" in server.entries
    assert [len(node.changes) for node in nodes] == changes


def test_records_of_who_is_gone_do_not_starve_who_lives(
    cluster: SimulatedCluster, server: StoreServer
) -> None:
    seal, n_dead = simulation_seal(DEFAULT_CLUSTER), 1000
    for i in range(n_dead):
        name = f"dead{i}"
        member = Member(name, 1, f"{name}:7000", transports={"tcp": "net"})
        server.write(name, seal.close(member), 0.0)
    first = cluster.start("n0", "h0:7000")
    cluster.run(60.0)
    # it comes when all others have been asked in vain; the record itself leads there, no join address does
    cluster.simulation.partition([first.network])
    second = cluster.start("n1", "h1:7000")
    cluster.simulation.heal()
    cluster.run(10.0)
    assert second.present() == first.present() == {"n0", "n1"}


def test_a_failed_start_says_what_to_look_at(cluster: SimulatedCluster, server: StoreServer) -> None:
    server.is_up = False
    with pytest.raises(RegistryError, match="the setting membership names the store, and p2pkv doctor"):
        cluster.start("n0", "h0:7000")


def test_clusters_whose_nodes_started_apart_find_each_other(
    cluster: SimulatedCluster, server: StoreServer
) -> None:
    first, second = cluster.start("n0", "h0:7000"), None
    cluster.simulation.partition([first.network])
    second = cluster.start("n1", "h1:7000")
    cluster.run(30.0)
    assert (first.present(), second.present()) == ({"n0"}, {"n1"})
    cluster.simulation.heal()
    cluster.run(12.0)
    assert cluster.agree()
