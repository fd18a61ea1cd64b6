"""A node with tenants and a keeper: each tenant's next life goes on with its own pool, and nobody with another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kept_nodes import KEYS, adopted, fetch, publish
from p2pkv import Config, Node
from p2pkv.cli.node import _drained
from p2pkv.cli.signals import EndingSignals
from tenancy import Secrets, settings


@pytest.fixture
def given(tmp_path: Path, keeper: str) -> dict[str, Any]:
    """The settings of a node with two tenants."""
    of_node = settings(Secrets(tmp_path), "acme", "zen", node_id="host", keeper=keeper, deadline=20.0)
    for tenant in of_node["tenants"].values():
        tenant["pool_size"] = "2MiB"
    return of_node


def start(given: dict[str, Any]) -> Node:
    return Node.start(Config.load(given, environ={}))


def test_each_goes_on_with_its_own_pool(given: dict[str, Any]) -> None:
    with start(given) as first:
        publish(first, KEYS[:4])
        publish(first.tenant("acme"), KEYS)
        publish(first.tenant("zen"), KEYS[:8])
        first.tenant("acme").retract(KEYS[:2])
    with start(given) as second:
        acme, zen = second.tenant("acme"), second.tenant("zen")
        assert (adopted(second), adopted(acme), adopted(zen)) == (4, len(KEYS) - 2, 8)
        assert (fetch(second, KEYS), fetch(acme, KEYS), fetch(zen, KEYS)) == (4, len(KEYS) - 2, 8)


def test_a_node_without_a_pool_has_those_of_its_tenants_kept(given: dict[str, Any]) -> None:
    given["pool_size"] = 0
    with start(given) as first:
        publish(first.tenant("acme"), KEYS)
    with start(given) as second:
        assert fetch(second.tenant("acme"), KEYS) == len(KEYS)


def test_tenants_whose_pages_are_kept_do_not_drain_when_the_node_is_told_to_end(
    given: dict[str, Any],
) -> None:
    with start(given | {"drain": 5.0}) as first:
        publish(first.tenant("acme"), KEYS)
        with EndingSignals() as ending:
            assert _drained(first, ending) is None
        assert first.tenant("acme").draining_within is None
    with start(given) as second:
        assert fetch(second.tenant("acme"), KEYS) == len(KEYS)


def test_a_node_that_was_told_to_drain_leaves_nothing_of_its_tenants(given: dict[str, Any]) -> None:
    with start(given) as first:
        publish(first, KEYS[:4])
        publish(first.tenant("acme"), KEYS)
        first.drain(0.1)
    with start(given) as second:
        assert (adopted(second), adopted(second.tenant("acme"))) == (0, 0)
        assert fetch(second.tenant("acme"), KEYS) == 0
