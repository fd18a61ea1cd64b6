"""Whatever happens to the nodes, those that live agree on who lives once the trouble is over."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.directory.membership.static import StaticMembership
from p2pkv.testing.simulated_cluster import SimulatedCluster
from p2pkv.testing.simulated_registry import SimulatedRegisteredMembership

N_NODES = 7
ADDRESSES = [f"h{i}:7000" for i in range(N_NODES)]

nodes = st.integers(0, N_NODES - 1)
events = st.one_of(
    st.tuples(st.just("kill"), nodes),
    st.tuples(st.just("restart"), nodes),
    st.tuples(st.just("leave"), nodes),
    st.tuples(st.just("stop"), nodes),
    st.tuples(st.just("resume"), nodes),
    st.tuples(st.just("hold"), nodes),
    st.tuples(st.just("oversleep"), nodes),
    st.tuples(st.just("partition"), nodes),
    st.tuples(st.just("heal"), st.just(0)),
)
schedules = st.lists(st.tuples(events, st.floats(0.0, 6.0)), max_size=12)


def apply(cluster, what, which):
    node_id = f"n{which}"
    node = cluster.nodes.get(node_id)
    if what == "partition":
        networks = [node.network for node in cluster.nodes.values()]
        cluster.simulation.partition(networks[:which], networks[which:])
    elif what == "heal":
        cluster.simulation.heal()
    elif node is None:
        if what == "restart":
            cluster.start(node_id, ADDRESSES[which], join=ADDRESSES)
    elif what == "kill":
        cluster.kill(node)
    elif what == "leave" and not node.network.is_stopped:
        node.engine.close()
        cluster.kill(node)
    elif what == "stop":
        cluster.simulation.stop(node.network)
    elif what == "resume" and node.network.is_stopped:
        cluster.simulation.resume(node.network)
    elif what == "hold" and not node.network.is_stopped:
        cluster.simulation.hold_interpreter(node.network, 10.0)
    elif what == "oversleep":
        node.network.late_probes = [3.0, 3.0]


@pytest.mark.parametrize(
    "engine_class", [EmbeddedMembership, StaticMembership, SimulatedRegisteredMembership]
)
@settings(deadline=None, max_examples=60)
@given(schedule=schedules, seed=st.integers(0, 2**32))
def test_the_living_agree_when_the_trouble_is_over(engine_class, schedule, seed):
    cluster = SimulatedCluster(engine_class, seed=seed)
    for i in range(N_NODES):
        cluster.start(f"n{i}", ADDRESSES[i], join=ADDRESSES)
    cluster.run(3)
    for (what, which), pause in schedule:
        apply(cluster, what, which)
        cluster.run(pause)
    cluster.simulation.heal()
    for node in cluster.nodes.values():
        if node.network.is_stopped:
            cluster.simulation.resume(node.network)
    cluster.run(40)
    assert all(node.expulsions == [] for node in cluster.nodes.values())
    assert cluster.agree(), {node.node_id: node.engine.view() for node in cluster.nodes.values()}
