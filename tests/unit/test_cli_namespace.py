"""`p2pkv namespace bump` and `p2pkv purge`: whom they tell, what they print."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster import eventually
from joined_nodes import joined_nodes
from p2pkv import Node
from p2pkv.cli import app
from p2pkv.cli.outsider import Outsider
from p2pkv.directory import epochs
from p2pkv.directory.view import Report, State
from p2pkv.errors import ControlError

KEYS = ["a", "b", "c"]


@pytest.fixture
def start() -> Iterator[Callable[..., Node]]:
    with joined_nodes() as start:
        yield start


@pytest.mark.parametrize("words", [["namespace", "bump"], ["purge"]])
def test_the_command_bumps_from_outside(start: Callable[..., Node], words: list[str]) -> None:
    node = start("one")
    memory = np.full((len(KEYS), 4096), 7, np.uint8)
    node.register_memory(memory)
    node.publish(KEYS, memory)
    result = CliRunner().invoke(app, [*words, "default", "--join", node.address, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == {"epoch": node.epoch, "heard": ["one"], "unreached": []}
    assert not node.exists(KEYS).any()
    assert node.counters()["p2pkv_pool_used_bytes"] == 0


def test_the_command_tells_those_that_the_members_have_given_up(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "MOMENT_S", 3.0)  # who lives answers in time, however busy the machine is
    one, other = start("one"), start("other")
    eventually(lambda: len(one.members()) == 2, 30.0)
    asked = Outsider.members

    def gives_up_the_other(*arguments: object) -> tuple[Report, str]:
        report, address = asked(*arguments)  # type: ignore[arg-type]
        members = (replace(m, state=State.DEAD) if m.node_id == "other" else m for m in report.members)
        return replace(report, members=tuple(members)), address

    monkeypatch.setattr(Outsider, "members", gives_up_the_other)
    result = CliRunner().invoke(app, ["namespace", "bump", "default", "--join", one.address, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == {"epoch": one.epoch, "heard": ["one", "other"], "unreached": []}
    assert other.epoch == one.epoch


def test_a_namespace_that_nobody_has_is_said_to_be_none(start: Callable[..., Node]) -> None:
    """Some of an engine's own it may be all the same: it is bumped, and no error."""
    one, _ = start("one"), start("other", namespace="mine vllm")
    command = ["namespace", "bump", "--join", one.address]
    eventually(lambda: len(one.members()) == 2, 30.0)
    said = CliRunner().invoke(app, [*command, "defualt"])
    assert said.exit_code == 0
    assert "defualt is in epoch" in said.stdout
    assert "no node that answers has the namespace 'defualt': theirs are default, mine vllm" in said.stderr
    for known in ("default", "default sglang", "mine", "mine vllm", "mine vllm model=m"):
        assert CliRunner().invoke(app, [*command, known]).stderr == ""


def test_a_bump_is_none_the_less_done_where_nobody_says_which_namespaces_there_are(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start("one")

    def silent(*_: object) -> frozenset[str]:
        raise ControlError("no node answered within 1 s")

    monkeypatch.setattr(Outsider, "namespaces", silent)
    said = CliRunner().invoke(app, ["namespace", "bump", "--join", node.address, "defualt"])
    assert (said.exit_code, said.stderr) == (0, "")
    assert "known to 1 node" in said.stdout
