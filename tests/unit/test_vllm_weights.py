"""vLLM replaces its weights: no block that was computed with some is ever loaded with others."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from cluster import eventually
from p2pkv.integrations.vllm_connector.weights import Weights, watch
from p2pkv.testing.ports import free_port
from vllm_engine import EngineFake
from vllm_fakes import BLOCK

N_BLOCKS = 4


@pytest.fixture
def engines() -> Iterator[list[EngineFake]]:
    """Three instances that share prefixes."""
    base: dict[str, Any] = {"join": f"127.0.0.1:{free_port()}", "pool_size": "1MiB", "deadline": 5.0}
    opened = [
        EngineFake(base | {"node_id": f"node{i}", "load_deadline": 5.0}, told=Weights()) for i in range(3)
    ]
    nodes = [node for engine in opened for node in engine.nodes]
    eventually(lambda: all(len(node.members()) == len(nodes) for node in nodes), 20.0)
    yield opened
    for engine in opened:
        engine.close()


def told(engine: EngineFake) -> Weights:
    weights: Weights = engine.scheduler._scheduler._weights
    return weights


def prompt(number: int) -> list[int]:
    return [number * 1000 + i for i in range(N_BLOCKS * BLOCK + 1)]


def run(engine: EngineFake, number: int) -> int:
    """Run a prompt; return how many of its tokens were loaded, all of them right."""
    request = engine.run(engine.submit(prompt(number)))
    assert engine.is_right(request, N_BLOCKS), "KV of other weights"
    engine.step_until(lambda: engine.is_idle)
    return request.loaded_tokens


@pytest.mark.parametrize("seed", range(3))
def test_no_block_of_other_weights_is_ever_loaded(engines: list[EngineFake], seed: int) -> None:
    rng = random.Random(seed)
    n_weights, n_loaded = 0, 0
    for _ in range(120):
        engine = rng.choice(engines)
        if rng.random() < 0.15:
            if rng.random() < 0.5:
                n_weights += 1
                engine.weights = n_weights
            else:
                engine.weights = rng.choice(engines).weights
            steps = [lambda: told(engine).told(f"v{engine.weights}"), engine.scheduler.reset_cache]  # noqa: B023
            rng.shuffle(steps)
            for step in steps if rng.random() < 0.7 else [engine.scheduler.reset_cache]:
                step()
            engine.step()
        else:
            n_loaded += run(engine, rng.randrange(3)) > 0
    assert n_loaded > 5, "nothing was shared, so nothing was shown"


@pytest.mark.parametrize("is_reset_first", [True, False])
def test_instances_that_are_told_one_version_share(engines: list[EngineFake], is_reset_first: bool) -> None:
    def update(engine: EngineFake, weights: int, version: str | None) -> None:
        engine.weights = weights
        if version is not None and not is_reset_first:
            told(engine).told(version)
        assert engine.scheduler.reset_cache()
        if version is not None and is_reset_first:
            told(engine).told(version)

    def loads(engine: EngineFake, number: int) -> bool:
        """Whether the prompt is loaded; a look-up on busy cores may come too late."""
        return any(run(engine, number) for _ in range(10))

    first, second, _ = engines
    run(first, 1)
    assert loads(second, 1)
    update(first, 1, "v1")
    run(first, 2)
    assert not run(second, 2), "of the new weights, which it has not"
    update(second, 1, "v1")
    assert loads(second, 2)
    update(first, 2, None)
    update(second, 3, None)
    run(first, 3)
    assert not run(second, 3), "nobody knows whether they are the same"


def test_a_version_is_no_leave_to_share_what_was_not_forgotten() -> None:
    weights = Weights()
    weights.told("v1")
    mixed = weights.name
    weights.reset()
    first = weights.name
    assert mixed != first
    weights.reset()
    assert weights.name not in (mixed, first), "other weights, of which no version was told"
    again = Weights()
    again.reset()
    again.told("v1")
    assert again.name == first
    again.told("v2")
    assert again.name not in (first, mixed), "its KV may be of both"


def test_the_engine_s_version_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    class EngineCore:
        version = "default"

        def set_weight_version(self, weight_version: str) -> None:
            self.version = weight_version

    core = ModuleType("vllm.v1.engine.core")
    core.EngineCore = EngineCore  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, core.__name__, core)
    heard = Weights()
    beside = Weights()  # the tier's, which is told of resets on its own
    for weights in (heard, heard, beside):
        watch(weights)
    engine = EngineCore()
    heard.reset()
    beside.reset()
    engine.set_weight_version("v7")
    assert engine.version == "v7"
    same = Weights()
    same.reset()
    same.told("v7")
    assert heard.name == beside.name == same.name
