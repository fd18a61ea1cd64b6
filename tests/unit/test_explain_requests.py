"""``explain --request``: what an engine's request found, where, and why it missed what it missed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_explain import World
from typer.testing import CliRunner

from p2pkv.cli import app
from p2pkv.explain.requests import Requests
from p2pkv.tracing import about


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.start("a")
    world.start("b", tracing=True)
    yield world
    world.close()


def _explain(world: World, *arguments: str) -> tuple[int, str]:
    asked = ["explain", *arguments, "--join", world.join, "--set", f"secret_file={world.secret}"]
    result = CliRunner().invoke(app, asked)
    return result.exit_code, result.output


def test_a_request_is_told_with_what_it_missed_and_why(world: World) -> None:
    world.publish("a", "x", "y", "z")
    world.nodes["a"].retract(["z"])
    with about("request-17"):
        assert world.nodes["b"].whereabouts(["x", "y", "z"]).outcomes.tolist() == [1, 1, 0]
        assert world.nodes["b"].fetch(["x", "y"], world.memory["b"][:2]).all()
    with about("request-18", "request-19"):
        world.publish("b", "of two requests")
    world.nodes["b"].exists(["of no request"])

    code, text = _explain(world, "--request", "request-17")
    assert code == 0, text
    first, second, why, third, answered = text.splitlines()
    assert first == "request 'request-17'"
    assert "b: whereabouts of 3 pages found 2, in " in second
    assert why.endswith("is not there: it was taken back by its publisher")
    assert "b: fetch of 2 pages found 2, in " in third
    assert answered == "  2 nodes answered"

    told = json.loads(_explain(world, "--request", "request-17", "--json")[1])
    [missed] = told["calls"][0]["missed"]
    assert (told["calls"][0]["pages"], told["calls"][0]["found"]) == (3, 2)
    assert told["missed"][missed]["verdict"] == "retracted"
    for request in ("request-18", "request-19"):
        assert "b: publish of 1 pages found 1" in _explain(world, "--request", request)[1]


def test_a_request_that_nobody_remembers_is_said_to_be_so(world: World) -> None:
    with about("request-17"):
        world.nodes["a"].exists(["x"])  # without tracing
    code, text = _explain(world, "--request", "request-17")
    assert code == 0
    assert "no node remembers a call for request 'request-17'" in text


@pytest.mark.parametrize("more", [["--id"], ["--namespace", "x"]])
def test_a_request_is_no_page(world: World, more: list[str]) -> None:
    code, text = _explain(world, "--request", "request-17", *more)
    assert code != 0, text


def test_what_is_remembered_has_bounds() -> None:
    def hash_keys(keys: object) -> np.ndarray:
        return np.zeros((len(list(keys)), 16), np.uint8)  # type: ignore[call-overload]

    remembered = Requests(hash_keys)
    for i in range(5000):
        remembered.heard([f"request-{i}"], "fetch", ["k"], np.ones(1, np.uint8), 0.1)
    assert not remembered.of("request-903")
    assert remembered.of("request-904")
    for _ in range(100):
        remembered.heard(["often"], "fetch", ["k"] * 40, np.zeros(40, np.uint8), 0.1)
    calls = remembered.of("often")
    assert len(calls) == 64
    assert len(calls[0].missed) == 16
