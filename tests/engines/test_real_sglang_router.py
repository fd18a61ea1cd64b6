"""Real SGLang servers behind the router: a pair answers as one server alone does. ``make test-sglang-pd``."""

from __future__ import annotations

import http.client
import json
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from router_process import RouterProcess, post
from sglang_pair import Pair, failures
from sglang_server import SGLangServer

from cluster import eventually

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

N_NEW = 12
LENGTHS = (7, 16, 33, 257)
"""Below, at and above a page (16), and in several chunks of prefill (128)."""
ANSWERED_S = 180.0
NOTICED_S = 60.0
"""For an engine to notice and count something, on cores that others use as well."""


@dataclass(frozen=True)
class Asked:
    """A request that can be sent to a single server and to the router alike."""

    path: str
    body: dict[str, Any] = field(hash=False)

    @property
    def n_prompts(self) -> int:
        """How many prompts it has."""
        prompts = self.body.get("prompt") or self.body.get("input_ids")
        return len(prompts) if prompts and isinstance(prompts[0], list) else 1


def tokens(length: int, seed: object) -> list[int]:
    """Return a prompt; no two begin alike."""
    random = Random(f"{length}/{seed}")
    return [random.randrange(300, 4000) for _ in range(length)]


def completion(prompt: object, *, stream: bool) -> Asked:
    limits = {"max_tokens": N_NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return Asked("/v1/completions", {"model": "tiny", "prompt": prompt, "stream": stream, **limits})


def generate(input_ids: object, *, stream: bool, **more: object) -> Asked:
    sampling = {"max_new_tokens": N_NEW, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": input_ids, "sampling_params": sampling, "stream": stream, **more}
    return Asked("/generate", body)


def chat(text: str, *, stream: bool) -> Asked:
    # SGLang refuses return_token_ids for chats that are streamed
    limits = {"max_tokens": N_NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": not stream}
    messages = [{"role": "user", "content": text}]
    return Asked("/v1/chat/completions", {"model": "tiny", "messages": messages, "stream": stream, **limits})


KINDS: dict[str, list[Asked]] = {
    "completions": [completion(tokens(n, "c"), stream=False) for n in LENGTHS],
    "streamed completions": [completion(tokens(n, "cs"), stream=True) for n in LENGTHS],
    "a batch of completions": [completion([tokens(n, "cb") for n in LENGTHS], stream=False)],
    "generate": [generate(tokens(n, "g"), stream=False) for n in LENGTHS],
    "streamed generate": [generate(tokens(n, "gs"), stream=True) for n in LENGTHS],
    "a batch of generate": [generate([tokens(n, "gb") for n in LENGTHS], stream=False)],
    "chat": [chat("w17 w4 w9 what follows?", stream=False), chat("w5 w8 w1 w12, and then?", stream=True)],
}
WITH_LOGPROBS = generate(tokens(40, "l"), stream=False, return_logprob=True, logprob_start_len=0)


def outputs(port: int, asked: Asked) -> list[list[Any]]:
    """Return the tokens of an answer, a list for each prompt; the text where SGLang tells no tokens."""
    raw = post(port, asked.path, asked.body)
    if asked.body["stream"]:
        events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
        assert events[-1] == b"[DONE]"
        parts = [json.loads(event) for event in events[:-1]]
    else:
        parts = [json.loads(raw)]
    if asked.path == "/generate":
        # streamed, each event has all tokens so far
        answers = parts[-1] if isinstance(parts[-1], list) else [parts[-1]]
        return [answer["output_ids"] for answer in answers]
    found: list[list[Any]] = [[] for _ in range(asked.n_prompts)]
    texts = [""] * asked.n_prompts  # as one: a server that is busy says several tokens in a piece
    for choice in (choice for part in parts for choice in part["choices"]):
        found[choice["index"]] += choice.get("token_ids") or choice.get("response_token_ids") or []
        texts[choice["index"]] += choice.get("delta", {}).get("content") or ""
    return [ids or ([text] if text else []) for ids, text in zip(found, texts, strict=True)]


class Served:
    """A prefill, a decode, and the router before them."""

    def __init__(self, folder: Path) -> None:
        self.pair = Pair(folder)
        prefill = f"http://127.0.0.1:{self.pair.prefill.port},bootstrap_port={self.pair.bootstrap_port}"
        self.router = RouterProcess(
            *("--heartbeats", "", "--mode", "sglang"),
            *("--prefill", f"{prefill},id=prefill"),
            *("--decode", f"http://127.0.0.1:{self.pair.decode.port},id=decode"),
        )
        self.port = self.router.port

    def wait(self) -> None:
        """Block until all are up."""
        self.pair.prefill.wait_until_ready()
        self.pair.decode.wait_until_ready()
        self.router.wait_until_ready()

    def in_flight(self) -> dict[str, int]:
        """Return the requests that the router has at each instance."""
        return {one["id"]: one["in_flight"] for one in self.router.instances()}

    def close(self) -> None:
        self.pair.close()
        self.router.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """Return a single server, up."""
    server = SGLangServer(tmp_path_factory.mktemp("single") / "single.log")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("sglang-router"))
    try:
        served.wait()
        yield served
    finally:
        served.close()


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_through_the_router_are_a_single_servers(
    served: Served, alone: SGLangServer, kind: str
) -> None:
    requests = KINDS[kind]
    before = served.pair.prefill.metrics().get("sglang:kv_transfer_total_mb_count", 0)
    with ThreadPoolExecutor(len(requests)) as threads:
        right = list(threads.map(lambda asked: outputs(alone.port, asked), requests))
        routed = list(threads.map(lambda asked: outputs(served.port, asked), requests))
    assert routed == right
    flat = [tuple(output) for answer in right for output in answer]
    assert all(flat)
    assert len(set(flat)) == len(flat), "alike outputs would hide wrong KV"

    # SGLang's own count of prompts whose KV went over, and p2pkv's of what went wrong with it
    prefill, decode = served.pair.prefill, served.pair.decode
    count = "sglang:kv_transfer_total_mb_count"
    eventually(lambda: prefill.metrics().get(count, 0) - before == len(flat), NOTICED_S)
    for server in (prefill, decode):
        assert server.metrics().get("sglang:num_transfer_failed_reqs_total", 0) == 0
        assert failures(server) == {}


def test_the_prompts_log_probabilities_are_a_single_servers(served: Served, alone: SGLangServer) -> None:
    right, routed = (
        json.loads(post(port, WITH_LOGPROBS.path, WITH_LOGPROBS.body)) for port in (alone.port, served.port)
    )
    assert routed["output_ids"] == right["output_ids"]
    for name in ("input_token_logprobs", "output_token_logprobs"):
        given, wanted = routed["meta_info"][name], right["meta_info"][name]
        assert [one[1] for one in given] == [one[1] for one in wanted]
        assert [one[0] for one in given[1:]] == pytest.approx([one[0] for one in wanted[1:]], abs=1e-3)


def test_samples_that_would_share_a_room_are_refused_and_both_go_on(
    served: Served, alone: SGLangServer
) -> None:
    asked = generate(tokens(100, "samples"), stream=False)
    sampling = asked.body["sampling_params"] | {"n": 2}
    with pytest.raises(urllib.error.HTTPError) as raised:
        served.router.post(asked.path, asked.body | {"sampling_params": sampling})
    with raised.value as error:
        assert error.code == 400
    assert outputs(served.port, asked) == outputs(alone.port, asked)


def test_a_client_that_leaves_is_cancelled_at_both(served: Served, alone: SGLangServer) -> None:
    asked = generate(tokens(3000, "leaves"), stream=True)
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=ANSWERED_S)
    connection.request("POST", asked.path, json.dumps(asked.body), {"Content-Type": "application/json"})
    eventually(lambda: served.in_flight() == {"prefill": 1, "decode": 1}, NOTICED_S)
    connection.close()
    eventually(lambda: served.in_flight() == {"prefill": 0, "decode": 0}, NOTICED_S)
    for server in (served.pair.prefill, served.pair.decode):
        # what its scheduler says of a request that it was told to give up, whatever it was doing with it
        eventually(lambda: "Aborted by AbortReq" in server.log.read_text(), NOTICED_S)  # noqa: B023

    # and both go on
    asked = generate(tokens(100, "stays"), stream=False)
    assert outputs(served.port, asked) == outputs(alone.port, asked)
