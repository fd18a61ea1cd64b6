"""The static engine: nobody but the nodes at the configured addresses."""

import pytest

from p2pkv.directory.membership.static import StaticMembership
from p2pkv.directory.view import Member, State, encode
from p2pkv.errors import MembershipError
from p2pkv.testing.simulated_cluster import SimulatedCluster

ADDRESSES = ["h0:7000", "h1:7000", "h2:7000"]


@pytest.fixture
def cluster():
    return SimulatedCluster(StaticMembership)


def test_a_stranger_is_not_let_in_whoever_vouches_for_it(cluster):
    nodes = [cluster.start(f"n{i}", ADDRESSES[i], join=ADDRESSES) for i in range(2)]
    stranger = Member("stranger", 1, "h9:7000")
    nodes[0].network.deliver(encode("n1", [stranger]), 0.0)
    nodes[0].network.deliver(encode("stranger", [stranger]), 0.0)
    cluster.run(3)
    assert cluster.agree()
    assert nodes[0].state_of("stranger") is None


def test_nobody_is_believed_about_others(cluster):
    nodes = [cluster.start(f"n{i}", ADDRESSES[i], join=ADDRESSES) for i in range(3)]
    cluster.run(3)
    victim = nodes[0].engine.view()["n2"]
    rumour = Member("n2", victim.boot_epoch, victim.address, 7, State.DEAD)
    nodes[0].network.deliver(encode("n1", [rumour]), 0.0)
    cluster.run(3)
    assert nodes[0].engine.view()["n2"].incarnation == 0
    assert all(node.died == {} for node in nodes)


def test_a_node_outside_the_list_can_not_start(cluster):
    with pytest.raises(MembershipError, match=r"none of .*h0:7000, h1:7000, h2:7000.* is this node's"):
        cluster.start("n9", "h9:7000", join=ADDRESSES)


def test_one_configuration_serves_all_processes_of_a_host(cluster):
    addresses = ["h0:7000", "h0:7001", "h0:7002"]
    for i in range(3):
        cluster.start(f"n{i}", f"h0:{9000 + i}", join=addresses)
    cluster.run(3)
    assert cluster.agree()
    found = [cluster.nodes["n0"].engine.view()[f"n{i}"].address for i in range(3)]
    assert found == addresses


def test_nobody_takes_over_the_address_of_a_dead_member(cluster):
    addresses = ["h0:7000", "h0:7001"]
    nodes = [cluster.start(f"n{i}", addresses[i], join=addresses) for i in range(2)]
    cluster.run(3)
    cluster.kill(nodes[1])
    cluster.run(10)
    assert cluster.simulation.holder("h0:7001") is None
    assert nodes[0].state_of("n1") is State.DEAD


def test_another_node_at_a_configured_address_replaces_the_one_before(cluster):
    nodes = [cluster.start(f"n{i}", ADDRESSES[i], join=ADDRESSES) for i in range(3)]
    cluster.run(3)
    cluster.kill(nodes[2])
    cluster.start("spare", "h2:7000", join=ADDRESSES)
    cluster.run(5)
    assert cluster.agree()
    assert nodes[0].state_of("n2") is State.DEAD
