"""The embedded engine: one id twice, rumours, deaths, and what changes cost."""

from dataclasses import replace

import pytest

from p2pkv.directory.membership.base import Identity, Listeners
from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.directory.view import LAST_EPOCH, Member, State, encode, node_key
from p2pkv.errors import ConfigError, MembershipError
from p2pkv.testing.simulated_cluster import SimulatedCluster


@pytest.fixture
def cluster():
    return SimulatedCluster(EmbeddedMembership)


def test_a_healed_partition_does_not_empty_the_rings(cluster):
    nodes = cluster.start_many(8)
    networks = [node.network for node in nodes]
    cluster.simulation.partition(networks[:1], networks[1:])
    cluster.run(10)
    for node in nodes:
        node.changes.clear()
    cluster.simulation.heal()
    cluster.run(10)
    assert cluster.agree()
    # the one that had been cut off buried them all; among themselves they know better
    for node in nodes[1:]:
        assert node.changes
        assert all(len(new.present()) >= 7 for _, new in node.changes)


def test_a_partition_heals_without_a_join_address_in_reach(cluster):
    start = cluster.start("start", "h0:7000")
    nodes = [cluster.start(f"n{i}", f"h{i}:7000", join=["h0:7000"]) for i in range(1, 5)]
    cluster.run(3)
    cluster.kill(start)
    networks = [node.network for node in nodes]
    cluster.simulation.partition(networks[:2], networks[2:])
    cluster.run(10)
    assert nodes[0].present() == {"n1", "n2"}
    cluster.simulation.heal()
    cluster.run(5)
    assert cluster.agree()


def test_of_two_that_started_apart_under_one_id_the_higher_boot_stays(cluster):
    first = cluster.start("twin", "h0:7000", join=["h1:7000"])
    cluster.run(1)
    cluster.simulation.partition([first.network], [])
    second = cluster.start("twin", "h1:7000", join=["h0:7000"])
    cluster.simulation.heal()
    cluster.run(5)
    assert second.engine.boot_epoch > first.engine.boot_epoch
    assert len(first.expulsions) == 1
    assert second.expulsions == []
    assert not first.network.is_announced


def test_of_two_of_one_id_and_one_boot_the_greater_address_stays(cluster):
    first = cluster.start("twin", "h0:7000", join=["h1:7000"], last_boot_epoch=2**61)
    cluster.simulation.partition([first.network], [])
    second = cluster.start("twin", "h1:7000", join=["h0:7000"], last_boot_epoch=2**61)
    cluster.simulation.heal()
    cluster.run(5)
    assert len(first.expulsions) == 1
    assert second.expulsions == []


def test_an_expelled_node_says_nothing_when_it_closes(cluster):
    cluster.start("peer", "h2:7000")
    first = cluster.start("twin", "h0:7000", join=["h2:7000"])
    cluster.simulation.stop(first.network)
    second = cluster.start("twin", "h1:7000", join=["h2:7000"])
    cluster.simulation.resume(first.network)
    cluster.run(3)
    assert first.expulsions
    first.engine.close()
    cluster.kill(first)
    cluster.run(3)
    assert cluster.nodes["peer"].state_of("twin") is State.ALIVE
    assert second.expulsions == []


def test_a_death_in_a_cluster_beyond_one_round_of_probes_is_noticed_in_time(cluster):
    nodes = [cluster.start(f"n{i}", f"h{i}:7000", join=["h0:7000"]) for i in range(70)]
    cluster.run(5)
    assert cluster.agree()
    killed_at = cluster.simulation.now
    victims = nodes[1:70:10]
    cluster.kill(*victims)
    cluster.run(5)
    assert cluster.agree()
    assert max(max(node.died.values()) for node in cluster.nodes.values()) - killed_at <= 3.5


def test_a_rumour_of_death_about_itself_is_refuted(cluster):
    nodes = cluster.start_many(3)
    own = nodes[0].engine.view()["n0"]
    rumour = Member("n0", own.boot_epoch, own.address, own.incarnation, State.DEAD)
    nodes[0].network.deliver(encode("n1", [rumour]), 0.0)
    cluster.run(2)
    assert nodes[0].n_resurrections == 1
    assert nodes[1].engine.view()["n0"].incarnation == own.incarnation + 1
    assert cluster.agree()


@pytest.mark.parametrize(
    "lie", [{"incarnation": LAST_EPOCH}, {"boot_epoch": LAST_EPOCH, "address": "h9:7000"}]
)
def test_what_nothing_can_be_above_keeps_nobody_out_for_good(cluster, lie):
    nodes = cluster.start_many(4)
    rumour = replace(nodes[0].engine.view()["n1"], state=State.DEAD, **lie)
    for node in nodes[:3]:
        node.network.deliver(encode("n3", [rumour]), 0.0)
    cluster.run(1)
    cluster.kill(nodes[3])
    cluster.run(700)  # the dead are remembered for 600 s
    assert cluster.agree()
    newcomer = cluster.start("new", "h9:7000", join=["h1:7000"])
    assert newcomer.present() == {"new", "n0", "n1", "n2"}, "everybody can read what n1 says"


@pytest.mark.parametrize("below", [1, 2**32, 2**32 + 1])
@pytest.mark.parametrize("state", [State.ALIVE, State.DEAD])
def test_who_is_told_of_a_late_boot_can_be_dead_and_come_back(cluster, below, state):
    nodes = cluster.start_many(4)
    rumour = replace(
        nodes[0].engine.view()["n1"], boot_epoch=LAST_EPOCH - below, address="h9:7000", state=state
    )
    for node in nodes[:3]:
        node.network.deliver(encode("n3", [rumour]), 0.0)
    cluster.kill(nodes[3])
    cluster.run(700)  # the dead are remembered for 600 s
    assert cluster.agree()
    cluster.simulation.stop(nodes[1].network)
    cluster.run(10)
    assert nodes[0].state_of("n1") is State.DEAD
    cluster.simulation.resume(nodes[1].network)
    cluster.run(10)
    assert cluster.agree()
    assert nodes[0].state_of("n1") is State.ALIVE


def test_an_id_of_the_last_boot_there_is_can_not_be_taken(cluster):
    nodes = cluster.start_many(2)
    cluster.start("n2", "h2:7000", join=["h0:7000"])
    cluster.run(1)
    rumour = replace(nodes[0].engine.view()["n2"], boot_epoch=LAST_EPOCH)
    cluster.kill(cluster.nodes["n2"])
    for node in nodes:
        node.network.deliver(encode("n1", [rumour]), 0.0)
    cluster.run(1)
    with pytest.raises(
        MembershipError, match=r"nothing is above; choose another node_id, or wait 10 minutes"
    ):
        cluster.start("n2", "h3:7000", join=["h0:7000"])


def test_a_rumour_of_death_about_a_member_that_answers_is_a_suspicion_only(cluster):
    nodes = cluster.start_many(3)
    victim = nodes[0].engine.view()["n2"]
    rumour = Member("n2", victim.boot_epoch, victim.address, victim.incarnation, State.DEAD)
    nodes[0].network.deliver(encode("n1", [rumour]), 0.0)
    cluster.run(3)
    assert all(node.died == {} for node in nodes)
    assert nodes[0].engine.view()["n2"].incarnation == victim.incarnation + 1


def test_the_death_of_a_stranger_is_not_passed_round(cluster):
    nodes = cluster.start_many(2)
    rumour = Member("stranger", 1, "h9:7000", state=State.DEAD)
    nodes[0].network.deliver(encode("n1", [rumour]), 0.0)
    cluster.run(2)
    assert nodes[0].state_of("stranger") is None


def test_the_dead_are_forgotten_after_a_while(cluster):
    nodes = cluster.start_many(3)
    cluster.kill(nodes[2])
    cluster.run(300)
    assert nodes[0].state_of("n2") is State.DEAD
    cluster.run(400)
    assert nodes[0].state_of("n2") is None
    assert nodes[1].state_of("n2") is None


def test_the_number_of_dead_is_bounded(cluster):
    node = cluster.start("n0", "h0:7000")
    for batch in range(3):
        ghosts = [Member(f"ghost-{batch}-{i}", 1, "h9:7000", state=State.SUSPECT) for i in range(1000)]
        node.network.deliver(encode("x", ghosts), 0.0)
        cluster.run(5)
    assert node.present() == {"n0"}
    assert len(node.engine.view()) == 1025


def test_more_members_than_a_view_holds_are_refused_and_counted(cluster):
    node = cluster.start("n0", "h0:7000")
    for batch in range(2):
        crowd = [Member(f"n-{batch}-{i}", 1, "h9:7000") for i in range(3000)]
        node.network.deliver(encode("x", crowd), 0.0)
    cluster.run(0.1)
    assert len(node.engine.view()) == 4096
    assert node.engine.counters()["p2pkv_membership_refused_records_total"] == 6001 - 4096


def test_an_id_that_shares_its_key_with_another_is_refused(cluster, monkeypatch):
    # no two ids with one 64-bit key are known; a hash of the first letter has plenty
    monkeypatch.setattr("p2pkv.directory.view.node_key", lambda node_id: ord(node_id[0]))
    monkeypatch.setattr("p2pkv.directory.membership.roster.node_key", lambda node_id: ord(node_id[0]))
    monkeypatch.setattr("p2pkv.directory.membership.entry.node_key", lambda node_id: ord(node_id[0]))
    first = cluster.start("alpha", "h0:7000")
    with pytest.raises(MembershipError, match=r"'alarm' has the same key as node 'alpha' at h0:7000"):
        cluster.start("alarm", "h1:7000", join=["h0:7000"])
    first.network.deliver(encode("x", [Member("axe", 1, "h5:7000")]), 0.0)
    cluster.run(1)
    assert first.present() == {"alpha"}
    assert first.engine.counters()["p2pkv_membership_refused_records_total"] == 1


@pytest.mark.parametrize("node_id", ["", "a\nb", "x" * 129])
def test_an_id_that_peers_would_refuse_is_refused_at_home(cluster, node_id):
    with pytest.raises(ConfigError, match="printable"):
        cluster.start(node_id, "h0:7000")


def test_the_key_of_a_probe_is_the_node_key(cluster):
    node = cluster.start("n0", "h0:7000")
    reply = node.network.reply()
    assert (reply.node_key, reply.boot_epoch) == (node_key("n0"), node.engine.boot_epoch)
    assert reply.digest == node.engine.view().digest


def test_a_newcomer_counts_with_the_listeners_before_anybody_is_shown_it(cluster):
    network = cluster.simulation.network("h0:7000")
    shown_early = []

    def look(_old, new):
        if "n1" in new:
            shown_early.append(network.announced_digest == new.digest or "n1" in engine.view())

    engine = EmbeddedMembership(network, Identity("n0"), listeners=Listeners(look), clock=network.clock)
    cluster.simulation.enter(network, engine)
    cluster.start("n1", "h1:7000", join=["h0:7000"])
    cluster.run(1)
    assert shown_early == [False]
    assert network.announced_digest == engine.view().digest
    assert "n1" in engine.view()


def test_a_broken_path_between_two_nodes_takes_nobody_off_anybodys_ring(cluster):
    nodes = cluster.start_many(6)
    for node in nodes:
        node.changes.clear()
    cluster.simulation.cut(nodes[1].network, nodes[2].network)
    cluster.simulation.cut(nodes[2].network, nodes[1].network)
    cluster.run(30)
    assert all(node.died == {} for node in nodes)
    # what the two can't reach they don't wait for; to nobody else has anything changed
    assert nodes[1].state_of("n2") is State.SUSPECT
    assert nodes[2].state_of("n1") is State.SUSPECT
    assert all(node.changes == [] for node in (nodes[0], *nodes[3:]))
    cluster.simulation.heal()
    cluster.run(2)
    assert nodes[1].state_of("n2") is State.ALIVE
    assert cluster.agree()


def test_what_one_node_does_not_hear_is_no_reason_to_give_others_up(cluster):
    nodes = cluster.start_many(6)
    for other in nodes[2:]:
        cluster.simulation.cut(other.network, nodes[1].network)
    cluster.run(30)
    assert all(node.died == {} for node in nodes)
    assert nodes[0].present() == nodes[1].present() == {f"n{i}" for i in range(6)}


def test_a_node_whose_path_is_broken_and_that_dies_is_given_up_in_time(cluster):
    nodes = cluster.start_many(5)
    cluster.simulation.cut(nodes[1].network, nodes[2].network)
    cluster.simulation.cut(nodes[2].network, nodes[1].network)
    cluster.run(10)
    killed_at = cluster.simulation.now
    cluster.kill(nodes[2])
    cluster.run(5)
    assert max(node.died["n2"] for node in cluster.nodes.values()) - killed_at <= 3.0
    assert cluster.agree()


def test_a_rumour_of_suspicion_is_not_believed(cluster):
    nodes = cluster.start_many(3)
    for node in nodes:
        node.changes.clear()
    victim = nodes[0].engine.view()["n2"]
    rumour = Member("n2", victim.boot_epoch, victim.address, victim.incarnation, State.SUSPECT)
    nodes[0].network.deliver(encode("n1", [rumour]), 0.0)
    cluster.run(3)
    assert all(node.changes == [] for node in nodes)


def test_a_change_costs_what_changed_and_not_the_whole_view(cluster):
    nodes = cluster.start_many(24)
    before = sum(node.network.nbytes_sent for node in nodes)
    cluster.kill(nodes[7])
    cluster.run(10)
    assert cluster.agree()
    told = sum(node.network.nbytes_sent for node in cluster.nodes.values()) - before
    whole = len(encode("n0", nodes[0].engine.view().values()))
    # each node tells three, and asks three before: a small message each, where a view is 24 records
    assert told / 23 < 3 * whole


def test_a_leave_costs_nobodys_whole_view(cluster):
    nodes = cluster.start_many(24)
    cluster.run(6)  # what was news is none any more
    answered = [node.network.nbytes_answered for node in nodes]
    leaver = nodes[7]
    leaver.engine.close()
    cluster.kill(leaver)
    cluster.run(3)
    assert cluster.agree()
    assert [node.network.nbytes_answered for node in nodes] == answered


@pytest.mark.parametrize("n_lost", [1, 5])
def test_a_loss_costs_nobodys_whole_view(cluster, n_lost):
    # more than are asked in one round, who find the loss one by one; all ask the join address meanwhile
    nodes = [cluster.start(f"n{i}", f"h{i}:7000", join=["h0:7000"]) for i in range(48)]
    cluster.run(8)
    assert cluster.agree()
    answered = [node.network.nbytes_answered for node in nodes]
    cluster.kill(*nodes[7 : 7 + n_lost])
    cluster.run(8)
    assert cluster.agree()
    assert [node.network.nbytes_answered for node in nodes] == answered


def test_who_has_missed_what_is_no_news_any_more_is_told_all_the_same(cluster):
    nodes = [cluster.start(f"n{i}", f"h{i}:7000", join=["h0:7000"]) for i in range(48)]
    cluster.run(8)
    for deaf in (
        nodes[0],
        nodes[9],
    ):  # the one at the join address, which all compare themselves with, and another
        cluster.simulation.hold_interpreter(deaf.network, 6.0)
    cluster.start("new", "h90:7000", join=["h1:7000"])
    cluster.run(5.9)
    for deaf in (nodes[0], nodes[9]):
        deaf.network._inbox.clear()  # what is told is told once: the messages are lost
        assert "new" not in deaf.present()
    cluster.run(3)
    assert cluster.agree()


@pytest.mark.parametrize("has_rival", [True, False])
def test_a_node_started_again_alone_with_its_clock_set_back_goes_on(cluster, has_rival):
    holder = cluster.start("n0", "h0:7000", join=["h0:7000"])
    others = [cluster.start(f"n{i}", f"h{i}:7000", join=["h0:7000"]) for i in (1, 2)]
    cluster.run(3)
    cluster.kill(holder)
    if has_rival:  # it came back elsewhere, as the others remember, and died there
        cluster.kill(cluster.start("n0", "h7:7000", join=["h1:7000"]))
    again = cluster.start("n0", "h0:7000", join=["h0:7000"], wall_offset_ns=10**18)
    cluster.run(15)
    assert again.expulsions == []
    assert cluster.agree()
    assert again.boots[-1] == again.engine.boot_epoch > holder.engine.boot_epoch
    assert others[0].engine.view()["n0"].boot_epoch == again.engine.boot_epoch


def test_a_view_that_fits_no_message_is_told_in_parts(cluster, monkeypatch, caplog):
    monkeypatch.setattr("p2pkv.directory.membership.messages.MAX_BODY", 1000)
    nodes = [cluster.start(f"n{i}", f"h{i}:7000", join=["h0:7000"]) for i in range(16)]
    cluster.run(20)
    assert cluster.agree()
    newcomer = cluster.start("new", "h20:7000", join=["h3:7000"])
    cluster.run(20)
    assert len(newcomer.present()) == 17
    assert max(len(node.network._blob) for node in nodes) <= 1000
    assert "peers are told parts of it" in caplog.text
