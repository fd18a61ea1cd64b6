"""Whatever raises inside the connector: every request ends, its blocks are free again, and what it loaded is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster import eventually
from p2pkv import Node
from p2pkv.integrations.vllm_connector.caches import GroupCaches, KVCaches
from p2pkv.integrations.vllm_connector.load import Load
from p2pkv.integrations.vllm_connector.loads import Loads
from p2pkv.integrations.vllm_connector.publishing import Publishing
from p2pkv.integrations.vllm_connector.scheduler import SchedulerSide
from p2pkv.offers.transfers import Transfers
from p2pkv.testing.ports import free_port
from vllm_engine import EngineFake
from vllm_fakes import BLOCK, RequestFake

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
N_BLOCKS = 256

PLACES: list[tuple[type, str]] = [
    *(
        (SchedulerSide, name)
        for name in ("arrived", "n_external", "allocated", "publish", "handoff", "finished")
    ),
    *((Loads, name) for name in ("_load", "_submit", "_pull", "_fetch", "_count", "_ask_again")),
    (Load, "settle"),
    *((GroupCaches, name) for name in ("rows", "pieces")),
    (KVCaches, "stream"),
    (Publishing, "add"),
    *((Node, name) for name in ("fetch", "publish", "exists", "clear", "members")),
    *((Transfers, name) for name in ("offer", "get_async")),
    (ThreadPoolExecutor, "_adjust_thread_count"),  # which comes after the work was queued
]
"""Where an error comes from: threads that can't be started, devices, a node that is closing, a bug."""


class Faults:
    """Makes some calls raise, in proportion; those that ``rng`` draws."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.share, self.n_raised = rng, 0.0, 0

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*args: Any, **kwargs: Any) -> Any:
            if self.rng.random() < self.share:
                self.n_raised += 1
                raise RuntimeError("can't start new thread")
            return original(*args, **kwargs)

        return maybe


@pytest.fixture
def faults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults = Faults(random.Random(request.getfixturevalue("seed")))
    for owner, name in PLACES:
        monkeypatch.setattr(owner, name, faults.around(getattr(owner, name)))
    return faults


@pytest.fixture
def pair(request: pytest.FixtureRequest, faults: Faults) -> Iterator[tuple[EngineFake, EngineFake]]:
    """A prefill and a decode instance, which share prefixes too."""
    kinds = request.getfixturevalue("kinds")
    base: dict[str, Any] = {"join": f"127.0.0.1:{free_port()}", "pool_size": "1MiB", "load_deadline": 2.0}
    opened = [
        EngineFake(base | {"node_id": f"node{i}", "transfer_lease": 2.0}, kinds=kinds, n_blocks=N_BLOCKS)
        for i in range(2)
    ]
    nodes = [node for engine in opened for node in engine.nodes]
    eventually(lambda: all(len(node.members()) == len(nodes) for node in nodes), 20.0)
    yield opened[0], opened[1]
    faults.share = 0.0
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("kinds", [("full",), ("full", "window", "chunk")])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_and_gives_its_blocks_back(
    pair: tuple[EngineFake, EngineFake], faults: Faults, seed: int, kinds: tuple[str, ...]
) -> None:
    prefill, decode = pair
    rng = random.Random(seed)
    faults.share = 0.05
    for _ in range(40):
        prompt = [rng.randrange(3) * 1000 + i for i in range(rng.randrange(1, 6) * BLOCK + 1)]
        kind = rng.choice(("prefix", "hand-off", "hand-off", "aborted", "reset"))
        if kind == "reset":
            assert rng.choice(pair).scheduler.reset_cache()
            continue
        params = None
        if kind != "prefix":
            prefilled = prefill.run(prefill.submit(prompt, PREFILL))
            params = prefilled.answer
            prefill.step()  # its workers hear of it in the next step
        request = decode.submit(prompt, params)
        if kind == "aborted":
            for _ in range(rng.randrange(3)):
                decode.step()
            if request.state != "finished":
                decode.abort(request)
            continue
        end(decode, request)
    faults.share = 0.0
    for engine in pair:
        engine.step_until(lambda engine=engine: engine.is_idle, 60.0)  # type: ignore[misc]
        assert sorted(engine.free) == list(range(1, N_BLOCKS)), f"seed {seed}: blocks are lost"
        assert not engine.wrong, f"seed {seed}: wrong KV"
    assert faults.n_raised > 10
    loads_again(prefill, decode)


def end(decode: EngineFake, request: RequestFake) -> None:
    """Have a request end; what it loaded is right when its blocks are used first."""
    decode.step_until(lambda: request.state in ("loading", "finished"))
    decode.step_until(lambda: request.state != "loading")
    if request.block_ids and request.loaded_tokens:
        assert decode.is_right(request, request.loaded_tokens // BLOCK), "wrong KV"
    decode.run(request)


def loads_again(prefill: EngineFake, decode: EngineFake) -> None:
    """Hand prompts off until one is loaded: on busy cores not every one is within the deadline."""
    for seed in range(10, 20):
        prompt = [seed * 1000 + i for i in range(2 * BLOCK + 1)]
        params = prefill.run(prefill.submit(prompt, PREFILL)).answer
        prefill.step()
        request = decode.submit(prompt, params)
        end(decode, request)
        if request.loaded_tokens:
            return
    raise AssertionError("nothing is loaded any more")
