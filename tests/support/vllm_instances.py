"""Instances of vLLM's fake (``vllm_engine.py``) handing prompts to each other: what their tests have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from vllm_engine import EngineFake
from vllm_fakes import RequestFake

Open = Callable[..., EngineFake]

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def tokens(n: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + i for i in range(n)]


def hand_off(prefill: EngineFake, prompt: list[int]) -> dict[str, Any]:
    """Compute a prompt for another instance; its blocks are kept from now on."""
    answer = prefill.run(prefill.submit(prompt, PREFILL)).answer
    assert answer is not None
    prefill.step()  # a worker hears of it with the next step, which vLLM takes at once
    return copy.deepcopy(answer)


def load(decode: EngineFake, prompt: list[int], given: dict[str, Any], *, n_local: int = 0) -> RequestFake:
    """Start a decode request and step until its blocks are there, or are known not to come."""
    request = decode.submit(prompt, given, n_local=n_local)
    decode.step()
    decode.step_until(lambda: request.state != "loading")
    return request


def load_prefix(engine: EngineFake, prompt: list[int], n_tokens: int) -> RequestFake:
    """Run a prompt until a look-up found all the prefix: on busy cores some come too late, and find less."""
    for _ in range(10):
        request = engine.submit(prompt)
        engine.step_until(lambda request=request: request.state in ("loading", "finished"))  # type: ignore[misc]
        engine.step_until(lambda request=request: request.state != "loading")  # type: ignore[misc]
        if request.loaded_tokens == n_tokens:
            return request
        engine.run(request)
    raise AssertionError(f"no request loaded {n_tokens} tokens")
