"""Real vLLM servers behind the router: a prefill and a decode answer as one instance alone does. ``make test-vllm``."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from router_process import RouterProcess
from vllm_server import VLLMServer, lasting_port, p2pkv

from cluster import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

LENGTHS = (7, 33, 64, 257)
N_NEW = 12


class Served:
    """A prefill, a decode, and the router before them, which finds them by the heartbeats of their connectors."""

    def __init__(self, folder: Path) -> None:
        join = [f"127.0.0.1:{lasting_port()}"]
        routers = [f"127.0.0.1:{lasting_port()}"]
        self.prefill = VLLMServer(
            folder / "prefill.log",
            p2pkv({"join": join, "node_id": "prefill"}, role="kv_producer"),
            routers=routers,
        )
        self.decode = VLLMServer(
            folder / "decode.log",
            p2pkv({"join": join, "node_id": "decode"}, role="kv_consumer", policy="recompute"),
            routers=routers,
            options=["--shutdown-timeout", "30"],  # by default vLLM kills its processes at once
        )
        # nobody goes without a good-bye
        self.router = RouterProcess("--heartbeats", routers[0], "--lifetime", "600")

    def wait(self) -> None:
        """Block until all are up."""
        self.prefill.wait_until_ready()
        self.decode.wait_until_ready()
        self.router.wait_until_ready()

    def ask(self, prompt: object, *, stream: bool = False, n: int = 1) -> list[list[int]]:
        """Return the ids that the router's answer has, a list for each choice."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "n": n,
            "max_tokens": N_NEW,
            # vLLM takes no n for a temperature of 0, which one token to choose from is as good as
            **({"temperature": 1, "top_k": 1} if n > 1 else {"temperature": 0}),
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        raw = self.router.post("/v1/completions", body)
        if not stream:
            return [choice["token_ids"] for choice in json.loads(raw)["choices"]]
        events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
        assert events[-1] == b"[DONE]"
        return [[token for event in events[:-1] for token in json.loads(event)["choices"][0]["token_ids"]]]

    def kill(self) -> None:
        self.prefill.kill()
        self.decode.kill()
        self.router.kill()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("vllm-router"))
    try:
        served.wait()
        yield served
    finally:
        served.kill()


def prompt(n_tokens: int, seed: int) -> list[int]:
    random = Random(f"{n_tokens}/{seed}")
    return [random.randrange(300, 4000) for _ in range(n_tokens)]


@pytest.mark.parametrize("stream", [False, True])
def test_outputs_through_the_router_are_a_single_instances(served: Served, stream: bool) -> None:
    prompts = [prompt(n, seed=int(stream)) for n in LENGTHS]
    alone = [served.prefill.ids(tokens, N_NEW) for tokens in prompts]
    assert len({tuple(ids) for ids in alone}) == len(alone)
    before = served.decode.prompt_tokens("external_kv_transfer")
    with ThreadPoolExecutor(len(prompts)) as threads:
        routed = list(threads.map(lambda tokens: served.ask(tokens, stream=stream), prompts))
    assert routed == [[ids] for ids in alone]
    # the decode computes the last token of a prompt itself, and has everything else from the prefill
    assert served.decode.prompt_tokens("external_kv_transfer") - before >= sum(LENGTHS) - 32 * len(LENGTHS)
    assert served.decode.counted("handoffs_failed") == 0


def test_a_request_for_several_answers_gets_them_all_right(served: Served) -> None:
    """The decode computes them alone: a hand-off is for one sequence."""
    prompts = [prompt(n, seed=7) for n in LENGTHS]
    alone = [served.prefill.ids(tokens, N_NEW) for tokens in prompts]
    offered = served.prefill.counted("handoffs_offered")
    assert served.ask(prompts) == alone
    assert served.ask(prompts[-1], n=2) == [alone[-1], alone[-1]]
    assert served.decode.counted("handoffs_failed") == 0
    assert served.prefill.counted("handoffs_offered") == offered


def test_models_and_errors_are_the_engines_own(served: Served) -> None:
    assert "tiny" in json.dumps(served.router.get("/v1/models"))
    with pytest.raises(urllib.error.HTTPError) as raised:
        served.router.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 999999})
    with raised.value as error:
        assert error.code == 400
        assert b"max" in error.read()


def test_an_instance_that_ends_says_good_bye(served: Served) -> None:
    served.decode.end()
    eventually(lambda: [one["role"] for one in served.router.instances()] == ["prefill"], 60.0)
