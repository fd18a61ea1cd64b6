"""Nodes that are restarted one after the other under load: what one had is found with the others."""

from __future__ import annotations

import pytest

from rolling_restart import RollingRestart


def _restarted(n_nodes: int, n_keys: int, skew: float) -> RollingRestart:
    """Say what share of the pages asked for was found before, meanwhile and after; judge that."""
    with RollingRestart(n_nodes=n_nodes, n_pages=200, n_keys=n_keys, skew=skew, drain_s=20.0) as world:
        world.fill()
        world.begin()
        world.ask(2 * n_keys)
        before = world.ask(2 * n_keys)
        during, seconds = world.restart_all()
        after = world.ask(n_keys)
    print(
        f"\n{n_keys} keys: {before.rate:.1%} hits before, {during.rate:.1%} of {during.n_asked} in {seconds:.0f} s "
        f"of restarts, {after.rate:.1%} after; {[node.drained for node in world.nodes]}"
    )
    assert before.wrong == during.wrong == after.wrong == []
    assert during.rate >= 0.95 * before.rate
    assert after.rate >= 0.95 * before.rate
    return world


def test_nodes_are_restarted_under_load_and_no_read_fails() -> None:
    world = _restarted(4, 550, 0.0)  # which three have room for
    assert world.failures == {}


@pytest.mark.slow
def test_eight_nodes_are_restarted_under_load_and_no_read_fails() -> None:
    world = _restarted(8, 1300, 0.0)
    assert world.failures == {}


@pytest.mark.slow
def test_eight_nodes_with_full_pools_are_restarted_under_load() -> None:
    _restarted(8, 3000, 1.0)
