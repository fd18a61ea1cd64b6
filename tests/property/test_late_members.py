"""Who answers late is not dead, not even where everybody is late; who is dead is found all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crowded_machine import CrowdedMachine
from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.directory.membership.health import MOST
from p2pkv.directory.membership.static import StaticMembership
from p2pkv.directory.view import State
from p2pkv.testing.simulated_cluster import SimulatedCluster
from p2pkv.testing.simulated_network import LATENCY
from p2pkv.testing.simulated_registry import SimulatedRegisteredMembership

ENGINES = [EmbeddedMembership, StaticMembership, SimulatedRegisteredMembership]
N_NODES = 6
ADDRESSES = [f"h{i}:7000" for i in range(N_NODES)]
SURE_S = 1.0
"""Late by so much, members live even while nobody has noticed that all are: they are given up after 2.4 s, and between
two probes is half a second, or nearly one where those before were waited for."""


def started(engine_class, seed):
    cluster = SimulatedCluster(engine_class, seed=seed)
    for i, address in enumerate(ADDRESSES):
        cluster.start(f"n{i}", address, join=ADDRESSES)
    cluster.run(3)
    assert cluster.agree()
    return cluster


def deaths(cluster):
    return sum(node.engine.counters()["p2pkv_membership_deaths_total"] for node in cluster.nodes.values())


def are_together(cluster):
    return all(node.present() == set(cluster.nodes) for node in cluster.nodes.values())


def stretch_of(node):
    return node.engine.counters()["p2pkv_membership_stretch"]


def stretches(cluster):
    return {stretch_of(node) for node in cluster.nodes.values()}


@pytest.mark.parametrize("engine_class", ENGINES)
@settings(deadline=None, max_examples=40)
@given(
    lateness=st.lists(st.floats(0.0, SURE_S), min_size=N_NODES, max_size=N_NODES), seed=st.integers(0, 2**32)
)
@example(lateness=[0.7] * N_NODES, seed=0)
@example(lateness=[SURE_S] * N_NODES, seed=0)
@example(lateness=[SURE_S, *[0.0] * (N_NODES - 1)], seed=0)
def test_who_answers_late_is_not_given_up(engine_class, lateness, seed):
    cluster = started(engine_class, seed)
    for node, answers_in in zip(cluster.nodes.values(), lateness, strict=True):
        node.network.answers_in = answers_in
    cluster.run(30)
    assert deaths(cluster) == 0


@pytest.mark.parametrize("engine_class", ENGINES)
@settings(deadline=None, max_examples=20)
@given(lateness=st.floats(0.45, SURE_S), others=st.floats(LATENCY, SURE_S), seed=st.integers(0, 2**32))
@example(lateness=SURE_S, others=LATENCY, seed=0)
def test_answers_that_come_after_a_death_hide_it_from_nobody(engine_class, lateness, others, seed):
    cluster = started(engine_class, seed)
    for node in cluster.nodes.values():
        node.network.answers_in = others
    victim = cluster.nodes["n0"]
    victim.network.answers_in = lateness
    cluster.run(10)
    cluster.kill(victim)
    cluster.run(3.5 * max(stretches(cluster)) + 2 * lateness)
    views = [node.engine.view() for node in cluster.nodes.values()]
    assert [view["n0"].state for view in views] == [State.DEAD] * (N_NODES - 1)


def test_one_slow_member_makes_nobody_slower():
    cluster = started(EmbeddedMembership, 1)
    cluster.nodes["n0"].network.answers_in = 1.0
    cluster.run(20)
    assert {
        n.engine.counters()["p2pkv_membership_stretch"] for k, n in cluster.nodes.items() if k != "n0"
    } == {1}


def test_who_was_late_is_as_quick_as_ever_once_all_are_on_time():
    cluster = started(EmbeddedMembership, 1)
    for node in cluster.nodes.values():
        node.network.answers_in = 1.5
    cluster.run(30)
    assert min(stretches(cluster)) > 1
    for node in cluster.nodes.values():
        node.network.answers_in = LATENCY
    cluster.run(20)
    assert stretches(cluster) == {1}


@pytest.mark.parametrize("seed", range(3))
def test_members_of_a_machine_with_too_much_to_do_come_together(seed):
    """Two dozen ask for twice what the machine can, until they notice it."""
    cluster = SimulatedCluster(EmbeddedMembership, seed=seed, simulation=CrowdedMachine(work_s=0.002))
    addresses = [f"h{i}:7000" for i in range(24)]
    for i, address in enumerate(addresses):
        cluster.start(f"n{i}", address, join=addresses[:1])
    cluster.run(20)
    assert are_together(cluster)
    before = deaths(cluster)
    cluster.run(60)
    assert are_together(cluster)
    assert deaths(cluster) == before


def crowded_once(cluster):
    """Have all be late for half a minute."""
    for node in cluster.nodes.values():
        node.network.answers_in = 1.5
    cluster.run(30)
    for node in cluster.nodes.values():
        node.network.answers_in = LATENCY


def test_one_that_stays_slow_after_a_crowd_keeps_nobody_slow():
    cluster = started(EmbeddedMembership, 1)
    crowded_once(cluster)
    cluster.nodes["n0"].network.answers_in = 0.6
    cluster.run(40)
    assert {stretch_of(cluster.nodes[f"n{i}"]) for i in range(1, N_NODES)} == {1}


@pytest.mark.parametrize("n_nodes", [3, 4, 5])
def test_a_broken_path_after_a_crowd_keeps_nobody_slow(n_nodes):
    cluster = SimulatedCluster(EmbeddedMembership, seed=1)
    nodes = cluster.start_many(n_nodes)
    crowded_once(cluster)
    cluster.simulation.cut(nodes[0].network, nodes[1].network)
    cluster.simulation.cut(nodes[1].network, nodes[0].network)
    cluster.run(60)
    assert stretches(cluster) == {1}
    assert deaths(cluster) == 0


def test_who_oversleeps_again_and_again_finds_the_dead_as_quickly_as_others():
    cluster = started(EmbeddedMembership, 1)
    for _ in range(20):
        cluster.nodes["n0"].network.late_probes = [0.9]
        cluster.run(8)
    assert stretches(cluster) == {1}


@pytest.mark.parametrize("n_cut", [1, 3, 4])
@pytest.mark.parametrize("n_killed", [0, 3])
def test_a_witness_that_takes_longer_does_not_let_others_wait(n_cut, n_killed):
    """One that is on time loses others, and whom it asks have found everybody late a moment ago."""
    cluster = SimulatedCluster(EmbeddedMembership, seed=1)
    first, *others = cluster.start_many(12)
    for node in others:
        node.engine._health.stretch = node.engine._detector.stretch = MOST
        node.engine._health._too_short = MOST - 1
        node.engine._health._late_at = cluster.simulation.now + 60.0
    cluster.run(5)
    for node in others[:n_cut]:
        cluster.simulation.cut(first.network, node.network)
        cluster.simulation.cut(node.network, first.network)
    if n_killed:
        cluster.kill(*others[-n_killed:])
    cluster.run(30)
    assert stretch_of(others[0]) == MOST
    assert not {node_id for node in cluster.nodes.values() for node_id in node.died} & set(cluster.nodes)


def test_one_that_says_others_are_dead_slows_nobody_down():
    cluster = started(EmbeddedMembership, 1)
    liar, *others = cluster.nodes.values()
    for _ in range(200):
        for node in others:
            death = replace(node.engine.view()[node.node_id], state=State.DEAD)
            node.network.deliver(liar.engine._messages.news([death]), cluster.simulation.now)
        cluster.run(0.5)
    assert max(stretch_of(node) for node in others) <= 2


def test_an_expelled_node_does_not_take_its_id_back_from_one_that_answers_late():
    cluster = SimulatedCluster(EmbeddedMembership, seed=1)
    nodes = cluster.start_many(4)
    cluster.simulation.partition([nodes[0].network], [node.network for node in nodes[1:]])
    cluster.run(5)
    successor = cluster.start("n0", "h9:7000", join=[nodes[1].network.address])
    cluster.simulation.partition([n.network for n in (*nodes[1:], successor)], [nodes[0].network])
    cluster.run(5)
    cluster.simulation.heal()
    cluster.run(10)
    assert nodes[0].expulsions
    for node in (*nodes, successor):
        node.network.answers_in = 0.6
    cluster.run(60)
    assert successor.expulsions == []


@pytest.mark.parametrize("answers_in", [1.3, 1.8])
def test_who_goes_on_under_an_id_is_heard_though_it_answers_late(answers_in):
    cluster = SimulatedCluster(EmbeddedMembership, seed=1)
    nodes = cluster.start_many(4)
    cluster.run(3)
    cluster.simulation.partition([nodes[0].network], [node.network for node in nodes[1:]])
    cluster.run(5)
    successor = cluster.start("n0", "h9:7000", join=[nodes[1].network.address])
    cluster.run(5)
    for node in (*nodes, successor):
        node.network.answers_in = answers_in
    cluster.run(10)
    cluster.simulation.heal()
    cluster.run(60)
    assert nodes[0].expulsions
    reboots = [node.engine.counters()["p2pkv_membership_reboots_total"] for node in (nodes[0], successor)]
    assert reboots == [0, 0]


@pytest.mark.parametrize("n_nodes", [4, 6])
def test_a_broken_path_among_late_members_gives_nobody_up(n_nodes):
    cluster = SimulatedCluster(EmbeddedMembership, seed=1)
    nodes = cluster.start_many(n_nodes)
    for node in nodes:
        node.network.answers_in = 0.9
    cluster.run(10)
    cluster.simulation.cut(nodes[0].network, nodes[1].network)
    cluster.simulation.cut(nodes[1].network, nodes[0].network)
    cluster.run(120)
    assert deaths(cluster) == 0
