"""What every membership engine keeps that finds out by itself. A new one adds a line to ``ENGINES``."""

import math

import pytest

from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.directory.membership.static import StaticMembership
from p2pkv.directory.membership.timing import Timing
from p2pkv.directory.view import State
from p2pkv.errors import DuplicateNodeError, MembershipError
from p2pkv.testing.simulated_cluster import SimulatedCluster
from p2pkv.testing.simulated_registry import SimulatedRegisteredMembership

ENGINES = [EmbeddedMembership, StaticMembership, SimulatedRegisteredMembership]


@pytest.fixture(params=ENGINES)
def engine_class(request):
    return request.param


@pytest.fixture
def cluster(engine_class):
    return SimulatedCluster(engine_class)


def test_nodes_find_each_other(cluster):
    nodes = cluster.start_many(5)
    member = nodes[0].engine.view()["n3"]
    assert (member.address, member.transports, member.weight) == ("h3:7000", {"tcp": "net"}, 1.0)
    assert member.boot_epoch == nodes[3].engine.boot_epoch > 0


def test_alone_it_is_a_cluster_of_one_within_half_a_second(cluster):
    node = cluster.start("n0", "h0:7000", join=["h0:7000", "h1:7000"])
    assert node.network.clock.now <= 0.5
    assert node.present() == {"n0"}


def test_every_change_is_told_in_order(cluster):
    nodes = cluster.start_many(4)
    cluster.kill(nodes[3])
    cluster.run(5)
    for node in nodes[:3]:
        assert len(node.changes[0][0]) == 0
        assert [old for old, _ in node.changes[1:]] == [new for _, new in node.changes[:-1]]
        assert node.changes[-1][1] is node.engine.view() or (
            node.changes[-1][1].digest == node.engine.view().digest
        )


def test_a_death_is_noticed_by_everybody_within_3_seconds(cluster):
    nodes = cluster.start_many(6)
    for victim in nodes[1:4]:
        cluster.run(0.17)
        killed_at = cluster.simulation.now
        cluster.kill(victim)
        cluster.run(4)
        for node in cluster.nodes.values():
            assert node.state_of(victim.node_id) is State.DEAD
            assert node.died[victim.node_id] - killed_at <= 3.0


def test_half_the_nodes_dying_at_once_are_noticed_within_3_seconds(cluster):
    nodes = cluster.start_many(24)
    killed_at = cluster.simulation.now
    cluster.kill(*nodes[::2])
    cluster.run(4)
    assert cluster.agree()
    for node in nodes[1::2]:
        assert len(node.died) == 12
        assert max(node.died.values()) - killed_at <= 3.0


def test_a_held_interpreter_is_not_suspected_and_suspects_nobody(cluster):
    nodes = cluster.start_many(4)
    before = [len(node.changes) for node in nodes]
    cluster.simulation.hold_interpreter(nodes[1].network, 10.0)
    cluster.run(15)
    assert cluster.agree()
    assert [len(node.changes) for node in nodes] == before
    assert nodes[1].engine.counters()["p2pkv_membership_late_rounds_total"] == 1


def oversleep_two_probes(cluster):
    nodes = cluster.start_many(4)
    nodes[1].network.late_probes = [10.0, 10.0]
    cluster.run(40)
    return nodes[1].engine.counters()["p2pkv_membership_suspicions_total"]


def test_a_node_that_overslept_its_own_probes_suspects_nobody(cluster):
    assert oversleep_two_probes(cluster) == 0


def test_without_the_safeguard_the_oversleeper_does_suspect(engine_class):
    unguarded = SimulatedCluster(engine_class, timing=Timing(lateness_tolerance=math.inf))
    assert oversleep_two_probes(unguarded) > 0


def test_a_suspicion_does_not_run_out_while_its_holder_sleeps(cluster):
    nodes = cluster.start_many(3)
    cluster.simulation.stop(nodes[2].network)
    while nodes[0].state_of("n2") is not State.SUSPECT:
        cluster.run(0.05)
    cluster.simulation.stop(nodes[0].network)
    cluster.simulation.stop(nodes[1].network)
    cluster.run(30)
    for node in nodes:
        cluster.simulation.resume(node.network)
    cluster.run(5)
    assert cluster.agree()
    assert all(node.died == {} for node in nodes)


def test_a_stopped_node_is_dead_and_alive_again_when_it_resumes(cluster):
    nodes = cluster.start_many(5)
    incarnation = nodes[2].engine.view()["n2"].incarnation
    cluster.simulation.stop(nodes[2].network)
    cluster.run(10)
    assert all(node.state_of("n2") is State.DEAD for node in nodes if node is not nodes[2])
    cluster.simulation.resume(nodes[2].network)
    cluster.run(3)
    assert cluster.agree()
    assert nodes[2].n_resurrections == 1
    assert nodes[2].died == {}
    assert nodes[0].engine.view()["n2"].incarnation > incarnation
    assert [node.n_resurrections for node in nodes if node is not nodes[2]] == [0] * 4


def test_a_node_stopped_for_longer_than_the_dead_are_remembered_knows_it_was_dead(cluster):
    nodes = cluster.start_many(3)
    cluster.simulation.stop(nodes[2].network)
    cluster.run(1000)
    assert nodes[0].state_of("n2") is None
    cluster.simulation.resume(nodes[2].network)
    cluster.run(5)
    assert cluster.agree()
    assert nodes[2].n_resurrections == 1


def test_a_partition_heals(cluster):
    nodes = cluster.start_many(6)
    networks = [node.network for node in nodes]
    cluster.simulation.partition(networks[:2], networks[2:])
    cluster.run(10)
    assert nodes[0].present() == {"n0", "n1"}
    assert nodes[5].present() == {"n2", "n3", "n4", "n5"}
    cluster.simulation.heal()
    cluster.run(10)
    assert cluster.agree()


def test_a_restart_has_a_higher_boot_and_replaces_the_dead(cluster):
    addresses = ["h0:7000", "h1:7000", "h2:7000"]
    cluster.start_many(3)
    first = cluster.nodes["n2"]
    cluster.kill(first)
    second = cluster.start("n2", "h2:7000", join=addresses)
    cluster.run(3)
    assert second.engine.boot_epoch > first.engine.boot_epoch
    assert cluster.nodes["n0"].engine.view()["n2"].boot_epoch == second.engine.boot_epoch
    assert cluster.agree()


def test_a_restart_with_its_clock_set_back_still_has_a_higher_boot(cluster):
    cluster.start_many(2)
    first = cluster.nodes["n1"]
    cluster.kill(first)
    second = cluster.start("n1", "h1:7000", join=["h0:7000", "h1:7000"], wall_offset_ns=0)
    assert second.engine.boot_epoch == first.engine.boot_epoch + 1


def test_a_remembered_boot_epoch_is_exceeded(cluster):
    node = cluster.start("n0", "h0:7000", join=["h0:7000"], last_boot_epoch=2**61)
    assert node.engine.boot_epoch == 2**61 + 1


def test_a_second_live_node_of_an_id_is_refused(cluster):
    addresses = ["h0:7000", "h1:7000", "h2:7000"]
    first = cluster.start("n0", "h0:7000", join=addresses)
    cluster.start("n1", "h1:7000", join=addresses)
    with pytest.raises(DuplicateNodeError, match=r"'n0' is in use by a live node at h0:7000.*node_id"):
        cluster.start("n0", "h2:7000", join=addresses)
    cluster.run(5)
    assert first.expulsions == []
    assert cluster.agree()


def test_a_stopped_and_replaced_node_is_expelled_when_it_resumes(cluster):
    addresses = ["h0:7000", "h1:7000", "h2:7000"]
    cluster.start("n0", "h0:7000", join=addresses)
    old = cluster.start("n1", "h1:7000", join=addresses)
    cluster.run(3)
    cluster.simulation.stop(old.network)
    cluster.run(5)
    new = cluster.start("n1", "h2:7000", join=addresses)
    cluster.run(5)
    cluster.simulation.resume(old.network)
    cluster.run(5)
    assert len(old.expulsions) == 1
    assert "h2:7000" in old.expulsions[0]
    assert new.expulsions == []
    assert cluster.agree()


def an_expelled_node(cluster):
    """Return a node that was expelled, the one that has its id, and a peer of both."""
    addresses = [f"h{i}:7000" for i in range(4)]
    peer = cluster.start("n0", "h0:7000", join=addresses)
    old = cluster.start("n1", "h1:7000", join=addresses)
    cluster.run(3)
    cluster.simulation.stop(old.network)
    cluster.run(5)
    new = cluster.start("n1", "h2:7000", join=addresses)
    cluster.simulation.resume(old.network)
    cluster.run(30)
    assert len(old.expulsions) == 1
    assert old.engine.counters()["p2pkv_expelled"] == 1
    return old, new, peer


@pytest.mark.parametrize("says_so", [False, True])
def test_an_expelled_node_is_a_member_again_when_its_successor_is_gone(cluster, caplog, says_so):
    old, new, peer = an_expelled_node(cluster)
    assert old.engine.view() == {}
    if says_so:
        new.engine.close()
    cluster.kill(new)
    cluster.nodes["n1"] = old
    cluster.run(15)
    assert cluster.agree()
    assert old.boots == [old.engine.boot_epoch]
    assert old.engine.boot_epoch == new.engine.boot_epoch + 1
    assert peer.engine.view()["n1"].boot_epoch == old.engine.boot_epoch
    assert old.engine.counters()["p2pkv_expelled"] == 0
    assert "node id n1" in caplog.text
    assert "member again" in caplog.text
    assert len(old.expulsions) == 1
    assert old.changes[-1][1].keys() >= {"n0", "n1"}


def test_an_expelled_node_stays_out_while_others_reach_the_one_that_has_its_id(cluster):
    old, new, peer = an_expelled_node(cluster)
    cluster.simulation.cut(old.network, new.network)
    cluster.simulation.cut(new.network, old.network)
    cluster.run(60)
    assert old.boots == []
    assert new.expulsions == []
    assert peer.engine.view()["n1"].address == "h2:7000"


def test_an_expelled_node_that_slept_does_not_take_its_sleep_for_silence(cluster):
    old, new, _ = an_expelled_node(cluster)
    cluster.simulation.cut(old.network, new.network)
    cluster.run(1)
    cluster.simulation.stop(old.network)
    cluster.run(60)
    cluster.simulation.heal()
    cluster.simulation.resume(old.network)
    cluster.run(30)
    assert old.boots == []
    assert new.expulsions == []


def test_of_two_expelled_nodes_of_one_id_one_comes_back(cluster):
    first, second, _ = an_expelled_node(cluster)
    cluster.simulation.stop(first.network)
    cluster.simulation.stop(second.network)
    cluster.run(5)
    third = cluster.start("n1", "h3:7000", join=[f"h{i}:7000" for i in range(4)])
    cluster.simulation.resume(first.network)
    cluster.simulation.resume(second.network)
    cluster.run(15)
    assert second.expulsions
    assert [node.network.is_announced for node in (first, second, third)] == [False, False, True]
    cluster.kill(third)
    cluster.run(40)
    assert sum(node.network.is_announced for node in (first, second)) == 1


def test_a_node_that_drains_is_a_member_without_a_part_of_the_ring_within_a_second(cluster):
    nodes = cluster.start_many(5)
    nodes[4].engine.drain()
    cluster.run(1.0)
    for node in nodes:
        member = node.engine.view()["n4"]
        assert (member.is_draining, member.weight, member.condition) == (True, 0.0, "DRAINING")
        assert node.present() == {"n0", "n1", "n2", "n3", "n4"}
    cluster.simulation.stop(nodes[4].network)  # until others take it for dead: it objects as what it is
    cluster.run(6)
    cluster.simulation.resume(nodes[4].network)
    cluster.run(6)
    assert [node.engine.view()["n4"].condition for node in nodes] == ["DRAINING"] * 5


def test_leaving_is_immediate_and_not_a_death(cluster):
    nodes = cluster.start_many(5)
    left_at = cluster.simulation.now
    nodes[4].network.clock.now = left_at
    nodes[4].engine.close()
    nodes[4].engine.close()
    cluster.kill(nodes[4])
    cluster.run(0.5)
    assert [node.state_of("n4") for node in nodes[:4]] == [State.LEFT] * 4
    assert max(node.died["n4"] for node in nodes[:4]) - left_at <= 0.1
    assert nodes[0].engine.counters()["p2pkv_membership_deaths_total"] == 0


def test_leaving_takes_at_most_half_a_second_whatever_hangs(cluster):
    nodes = cluster.start_many(5)
    for node in nodes[1:]:
        cluster.simulation.stop(node.network)
    before = nodes[0].network.clock.now
    nodes[0].engine.close()
    assert nodes[0].network.clock.now - before <= 0.5


def test_a_closed_membership_can_not_be_started_again(cluster):
    node = cluster.start("n0", "h0:7000", join=["h0:7000"])
    node.engine.close()
    with pytest.raises(MembershipError, match="build another one"):
        node.engine.enter(1.0)


@pytest.mark.parametrize("blob", [b"", b"\xff" * 100, b"\x81\xa7version\x07", b"\x93\x01\x02\x03"])
def test_garbage_is_dropped_and_counted(cluster, blob):
    nodes = cluster.start_many(3)
    nodes[0].network.deliver(blob, 0.0)
    cluster.run(2)
    assert cluster.agree()
    assert nodes[0].engine.counters()["p2pkv_membership_malformed_views_total"] == 1


def test_a_run_with_the_same_seed_is_the_same_run(engine_class):
    def history():
        cluster = SimulatedCluster(engine_class, seed=7)
        nodes = cluster.start_many(4)
        cluster.kill(nodes[1])
        cluster.run(5)
        return [(node.died, len(node.changes), node.network.clock.now) for node in nodes]

    assert history() == history()
