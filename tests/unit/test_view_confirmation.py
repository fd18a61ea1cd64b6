"""The directory sweeps out entries of strangers only while membership says that it knows everybody."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from p2pkv.directory.membership.base import Identity, Listeners
from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.testing.simulated_network import Simulation


def test_the_view_is_confirmed_twice_a_second_and_not_while_the_interpreter_is_held() -> None:
    simulation = Simulation()
    network = simulation.network("h0:7000")
    confirmed: list[float] = []
    engine = EmbeddedMembership(
        network,
        Identity("n0"),
        listeners=Listeners(on_confirmed=lambda: confirmed.append(network.clock.now)),
        clock=network.clock,
        random=Random(1),
    )
    simulation.enter(network, engine)
    simulation.run(10.0)
    assert len(confirmed) >= 18
    assert max(b - a for a, b in pairwise(confirmed)) < 1.0
    before = len(confirmed)
    simulation.hold_interpreter(network, 20.0)
    simulation.run(19.0)
    assert len(confirmed) == before
    simulation.run(3.0)
    assert len(confirmed) > before
