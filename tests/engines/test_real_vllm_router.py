"""Real vLLM servers behind the router: a prefill and a decode answer as one instance alone does. ``make test-vllm``."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
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
        self.port = lasting_port()
        self._router = subprocess.Popen(
            [
                *(sys.executable, "-c", "from p2pkv_proxy.cli import main; main()"),
                *("--listen", f"127.0.0.1:{self.port}", "--heartbeats", routers[0]),
                *("--lifetime", "600"),  # nobody goes without a good-bye
            ],
        )

    def wait(self) -> None:
        """Block until all are up."""
        self.prefill.wait_until_ready()
        self.decode.wait_until_ready()
        eventually(lambda: self.get("/healthz") == {"ready": True, "roles": ["decode", "prefill"]}, 60.0)

    def roles(self) -> set[str]:
        """Return what the instances do that the router has."""
        listed = self.get("/instances")
        return {instance["role"] for instance in listed} if isinstance(listed, list) else set()

    def get(self, path: str) -> object:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
                return json.load(response)
        except OSError:
            return None

    def ask(self, tokens: list[int], *, stream: bool) -> list[int]:
        """Return the ids that the router's answer has."""
        body = {
            "model": "tiny",
            "prompt": tokens,
            "max_tokens": N_NEW,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=180) as response:  # noqa: S310
            raw = response.read()
        if not stream:
            ids: list[int] = json.loads(raw)["choices"][0]["token_ids"]
            return ids
        events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
        assert events[-1] == b"[DONE]"
        return [token for event in events[:-1] for token in json.loads(event)["choices"][0]["token_ids"]]

    def kill(self) -> None:
        self.prefill.kill()
        self.decode.kill()
        self._router.kill()
        self._router.wait()


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
    assert routed == alone
    # the decode computes the last token of a prompt itself, and has everything else from the prefill
    assert served.decode.prompt_tokens("external_kv_transfer") - before >= sum(LENGTHS) - 32 * len(LENGTHS)
    assert served.decode.counted("handoffs_failed") == 0


def test_models_and_errors_are_the_engines_own(served: Served) -> None:
    assert "tiny" in json.dumps(served.get("/v1/models"))
    request = urllib.request.Request(
        f"http://127.0.0.1:{served.port}/v1/completions",
        b'{"model": "tiny", "prompt": "x", "max_tokens": 999999}',
    )
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=60)  # noqa: S310
    with raised.value as error:
        assert error.code == 400
        assert b"max" in error.read()


def test_an_instance_that_ends_says_good_bye(served: Served) -> None:
    served.decode.end()
    eventually(lambda: served.roles() == {"prefill"}, 60.0)
