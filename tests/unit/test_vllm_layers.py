"""Hand-offs that vLLM's steps compute with while they are loaded: which are, and what is done if one does not come."""

from __future__ import annotations

from typing import Any

import pytest

from p2pkv.errors import ConfigError
from p2pkv.integrations.vllm import P2PKVConnector
from p2pkv.testing.lateness import returns_within
from vllm_engine import EngineFake
from vllm_fakes import BLOCK, RequestFake, kv_cache_config, vllm_config
from vllm_instances import Open, hand_off, load, tokens
from vllm_layers import LayerEngineFake

DEADLINE_S = 0.3
LAYERS_S = {"share_prefixes": False, "layer_deadline": DEADLINE_S}


class WithoutWaits(LayerEngineFake):
    """Runs its layers as a CUDA graph of the whole model would."""

    def _forward(self, scheduled: dict[str, int]) -> None:
        wait, self.worker.wait_for_layer_load = self.worker.wait_for_layer_load, lambda name: None  # type: ignore[method-assign]
        super()._forward(scheduled)
        self.worker.wait_for_layer_load = wait  # type: ignore[method-assign]


def prompt_of(n_blocks: int, seed: int) -> list[int]:
    return tokens(n_blocks * BLOCK + 1, seed)


def near(prefill: EngineFake, decode: EngineFake) -> None:
    """Have a first load come whole, in the background; on busy cores not the first one may."""
    for seed in range(100, 110):
        prompt = prompt_of(1, seed)
        if load(decode, prompt, hand_off(prefill, prompt)).loaded_tokens == len(prompt):
            decode.step_until(lambda: decode.is_idle)
            return
    raise AssertionError("no load comes")


def by_layer(prefill: EngineFake, decode: EngineFake, prompt: list[int]) -> RequestFake:
    """Hand a prompt over, which takes one step."""
    request = decode.submit(prompt, hand_off(prefill, prompt))
    decode.step()
    return request


def test_a_step_computes_with_what_it_loads_once_prefill_is_known(open_engine: Open) -> None:
    prefill = open_engine({"share_prefixes": False}, role="kv_producer")
    decode = open_engine(LAYERS_S | {"layer_deadline": 30.0}, role="kv_consumer", kind=LayerEngineFake)
    near(prefill, decode)
    assert "handoffs_loaded_by_layer" not in decode.counts
    for n_tokens in (1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 3):
        request = by_layer(prefill, decode, tokens(n_tokens, n_tokens))
        assert request.state == "finished"
        assert request.loaded_tokens == (n_tokens - 1) // BLOCK * BLOCK, (
            "a block that is written to is not loaded"
        )
        prefill.step_until(lambda: prefill.is_idle)
    assert decode.counts["handoffs_loaded_by_layer"] == 3
    assert not decode.wrong
    assert "handoffs_failed" not in decode.counts


@pytest.mark.parametrize("gone", ["offers", "node"])
def test_a_prefill_that_is_gone_holds_up_one_step_only(open_engine: Open, gone: str) -> None:
    prefill = open_engine({"share_prefixes": False}, role="kv_producer")
    decode = open_engine(LAYERS_S | {"load_deadline": 1.0}, role="kv_consumer", kind=LayerEngineFake)
    near(prefill, decode)
    given = [hand_off(prefill, prompt_of(3, seed)) for seed in range(6)]
    for each in given:
        each["p2pkv"]["name"] = "made up" if gone == "offers" else each["p2pkv"]["name"]
    if gone == "node":
        prefill.close()
    requests = [decode.submit(prompt_of(3, seed), each) for seed, each in enumerate(given[:3])]
    with returns_within(DEADLINE_S + 0.2):
        decode.step()
    assert all(request.state == "running" for request in requests), "they are computed instead"
    requests += [decode.submit(prompt_of(3, seed), given[seed]) for seed in range(3, 6)]
    with returns_within(DEADLINE_S / 2):
        decode.step()
    assert [request.state for request in requests] == ["finished"] * 3 + ["loading"] * 3
    decode.step_until(lambda: decode.is_idle)
    assert decode.counts["handoffs_failed"] == 6
    assert not decode.wrong


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_layers_that_nobody_waits_for_are_a_load_that_failed(open_engine: Open, policy: str) -> None:
    prefill = open_engine({"share_prefixes": False}, role="kv_producer")
    decode = open_engine(LAYERS_S, role="kv_consumer", policy=policy, kind=WithoutWaits)
    near(prefill, decode)
    request = by_layer(prefill, decode, prompt_of(3, 1))
    decode.step_until(lambda: decode.is_idle)
    assert decode.errors == ([request.request_id] if policy == "fail" else [])
    assert decode.counts["handoffs_failed"] == 1
    assert not decode.wrong


def connector(
    settings: dict[str, Any], role: str, kinds: tuple[str, ...] = ("full",), **more: Any
) -> P2PKVConnector:
    config = vllm_config(settings, role, "recompute")
    for name, value in more.items():
        setattr(config, name, value)
    return P2PKVConnector(config, None, kv_cache_config(kinds=kinds))


def test_where_a_load_that_failed_could_not_be_told_layers_are_not_waited_for() -> None:
    config = vllm_config({}, "kv_consumer", "recompute")
    config.parallel_config.pipeline_parallel_size = 2
    for match, role, settings, more in (
        ("publishes prefixes", "kv_both", {"share_prefixes": True}, {}),
        ("keep different KV", "kv_consumer", {}, {"kinds": ("full", "window")}),
        ("speculative", "kv_consumer", {}, {"speculative_config": object()}),
        ("pipeline", "kv_consumer", {}, {"parallel_config": config.parallel_config}),
    ):
        with pytest.raises(ConfigError, match=match):
            connector(LAYERS_S | settings, role, **more)
    connector(LAYERS_S | {"share_prefixes": True}, "kv_producer")  # which loads nothing
    with pytest.raises(ConfigError, match="at most 3600"):
        connector({"layer_deadline": -1}, "kv_consumer")
    assert P2PKVConnector.requires_piecewise_for_cudagraph(LAYERS_S)
    assert not P2PKVConnector.requires_piecewise_for_cudagraph({"layer_deadline": 0})
