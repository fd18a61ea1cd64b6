"""How nodes of the embedded engine find each other: join addresses, names, clusters that become one or stay apart."""

import pytest

from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.errors import MembershipError
from p2pkv.testing.simulated_cluster import SimulatedCluster


@pytest.fixture
def cluster():
    return SimulatedCluster(EmbeddedMembership)


def test_any_live_node_can_be_joined_through(cluster):
    cluster.start("a", "h0:7000")
    cluster.start("b", "h1:7000", join=["h0:7000"])
    cluster.start("c", "h2:7000", join=["h1:7000"])
    cluster.run(1)
    assert cluster.agree()


def test_a_newcomer_knows_the_cluster_at_once(cluster):
    nodes = cluster.start_many(5)
    newcomer = cluster.start("new", "h9:7000", join=["h3:7000"])
    assert newcomer.present() == {"new", *(node.node_id for node in nodes)}
    cluster.run(0.2)
    assert cluster.agree()


def test_two_clusters_that_learn_of_each_other_become_one(cluster):
    cluster.start("a0", "h0:7000")
    cluster.start("a1", "h1:7000", join=["h0:7000"])
    # the first address to join is not there yet: a cluster of its own
    cluster.start("b0", "h2:7000", join=["h3:7000"])
    cluster.start("b1", "h4:7000", join=["h2:7000"])
    cluster.run(3)
    assert cluster.nodes["b1"].present() == {"b0", "b1"}
    cluster.start("bridge", "h3:7000", join=["h0:7000"])
    cluster.run(3)
    assert cluster.agree()


def test_the_first_process_of_a_host_takes_the_join_address(cluster):
    for i in range(4):
        cluster.start(f"n{i}", f"h0:{9000 + i}", join=["h0:7000"])
    cluster.run(2)
    assert cluster.agree()
    assert cluster.simulation.holder("h0:7000") is cluster.nodes["n0"].network


def test_a_dead_holder_of_a_join_address_is_succeeded_on_its_host(cluster):
    nodes = [cluster.start(f"n{i}", f"h0:{9000 + i}", join=["h0:7000", "h1:7000"]) for i in range(3)]
    cluster.start("far", "h1:9000", join=["h0:7000", "h1:7000"])
    cluster.run(2)
    cluster.kill(nodes[0])
    cluster.run(3)
    holder = cluster.simulation.holder("h0:7000")
    assert holder in (nodes[1].network, nodes[2].network)
    assert cluster.simulation.holder("h1:7000") is cluster.nodes["far"].network
    newcomer = cluster.start("new", "h2:9000", join=["h0:7000"])
    assert newcomer.present() == {"n1", "n2", "far", "new"}


def test_a_silent_holder_is_passed_over_within_half_a_second(cluster):
    holder = cluster.start("holder", "h0:7000")
    cluster.start("other", "h1:7000")
    cluster.simulation.stop(holder.network)
    node = cluster.start("new", "h2:7000", join=["h0:7000", "h1:7000"])
    assert node.network.clock.now <= 0.5
    assert node.present() == {"other", "new"}


def test_a_join_address_that_leads_nowhere_is_named_once(cluster, caplog):
    cluster.start("alone", "h0:7000", join=["h9:7000"])
    cluster.run(20)
    warnings = [text for text in caplog.messages if "h9:7000" in text]
    assert len(warnings) == 1
    assert "no node answers at join address" in warnings[0]


def test_an_expelled_node_frees_the_join_address_it_holds(cluster):
    cluster.start("peer", "h2:7000", join=["h0:7000"])
    first = cluster.start("twin", "h0:9000", join=["h0:7000"])
    cluster.run(2)
    assert cluster.simulation.holder("h0:7000") is first.network
    cluster.simulation.stop(first.network)
    cluster.start("twin", "h1:7000", join=["h2:7000"])
    cluster.simulation.resume(first.network)
    cluster.run(3)
    assert first.expulsions
    assert cluster.simulation.holder("h0:7000") is None


def test_nobody_is_called_a_silent_join_address_for_being_dead(cluster, caplog):
    cluster.start("a", "h0:7000")
    peer = cluster.start("b", "h1:7000", join=["h0:7000"])
    cluster.kill(peer)
    cluster.run(30)
    assert "join address h1:7000" not in caplog.text


def test_clusters_of_different_names_stay_apart(cluster, caplog):
    a = [cluster.start(f"a{i}", f"h{i}:7000", join=["h0:7000"], cluster="a") for i in range(2)]
    # the bridge starts before who it joins is there
    b = [cluster.start(f"b{i}", f"h{i}:7000", join=["h2:7000", "h9:7000"], cluster="b") for i in (2, 3)]
    bridge = cluster.start("b9", "h9:7000", join=["h2:7000"], cluster="b")
    crossing = cluster.start("a9", "h8:7000", join=["h7:7000", "h1:7000"], cluster="a")
    cluster.start("b7", "h7:7000", join=["h2:7000"], cluster="b")
    cluster.run(10)
    assert a[0].present() == crossing.present() == {"a0", "a1", "a9"}
    assert b[0].present() == bridge.present() == {"b2", "b3", "b9", "b7"}
    assert crossing.engine.counters()["p2pkv_membership_refused_clusters_total"] > 0
    assert "it is of cluster 'b', this node of cluster 'a'" in caplog.text


def test_a_node_that_finds_another_cluster_only_does_not_start(cluster):
    cluster.start("a", "h0:7000", cluster="prod")
    with pytest.raises(MembershipError, match="is of cluster 'prod', this node of cluster 'test'"):
        cluster.start("b", "h1:7000", join=["h0:7000"], cluster="test")


def test_all_nodes_behind_one_name_meet_whoever_comes_first_in_it(cluster):
    hosts = [f"h{i}" for i in range(4)]
    cluster.simulation.names["headless"] = hosts
    for host in hosts:
        # a host's own address comes first there, as name servers' clients sort it
        cluster.simulation.names[f"headless-{host}"] = [host, *(other for other in hosts if other != host)]
        cluster.start(host, f"{host}:7400", join=[f"headless-{host}:7400"])
    cluster.run(3)
    assert cluster.agree()


def test_whoever_comes_behind_a_name_later_is_found(cluster, caplog):
    caplog.set_level("INFO")
    cluster.simulation.names["headless"] = ["h0"]
    cluster.start("a", "h0:7400", join=["headless:7400"])
    cluster.run(3)
    assert caplog.text.count("alone so far: the join address is this node's own") == 1
    cluster.start("b", "h1:7400", join=["h1:7400"])
    cluster.simulation.names["headless"] = ["h0", "h1"]
    cluster.run(3)
    assert cluster.agree()
