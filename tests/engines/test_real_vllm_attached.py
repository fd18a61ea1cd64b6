"""Real vLLM servers whose pages their host's node has: ``make test-vllm``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from hosts_node import HostsNode, hosts_node
from test_real_vllm_tier import offloading
from vllm_server import BLOCK, VLLMServer, lasting_port, p2pkv

from cluster import eventually
from demo.xpyd.real_engines import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

NOTICED_S = 60.0


def prompt(n_tokens: int, seed: int) -> list[int]:
    random = Random(f"{n_tokens}/{seed}")
    return [random.randrange(300, 4000) for _ in range(n_tokens)]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostsNode]:
    with hosts_node(tmp_path) as node:
        yield node


@pytest.fixture
def started() -> Iterator[list[VLLMServer]]:
    servers: list[VLLMServer] = []
    yield servers
    for server in servers:
        server.kill()


def test_a_server_that_is_killed_finds_its_pages_when_it_is_back(
    host: HostsNode, started: list[VLLMServer], tmp_path: Path
) -> None:
    endpoint = f"tcp://127.0.0.1:{lasting_port()}"
    told = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint.replace("127.0.0.1", "*"),
    }
    options = ["--enable-prefix-caching", "--kv-events-config", json.dumps(told)]

    def start(attach: str) -> VLLMServer:
        settings = {"node_id": "one", "attach": attach, "deadline": 5.0}
        transfer = p2pkv(settings, role="kv_both", policy="recompute")
        log = tmp_path / f"one-{len(started)}.log"
        started.append(VLLMServer(log, transfer, options=options, environment=host.environment))
        started[-1].wait_until_ready()
        return started[-1]

    first = start(host.attach)
    seen: dict[str, set[object]] = {}
    with zmq.Context() as context, context.socket(zmq.SUB) as events:
        events.subscribe(b"")
        events.connect(endpoint)
        # until the subscription has come through there are events that nobody hears
        eventually(lambda: first.ids(prompt(3 * BLOCK, len(seen)), 1) and hear(events, seen), NOTICED_S)
        tokens = prompt(10 * BLOCK + 9, seed=1)
        ids = first.ids(tokens)
        eventually(lambda: first.counted("prefix_blocks_published") >= 13, NOTICED_S)
        # blocks in the host's node, by the names that vLLM's own have; told with some step or other later
        eventually(
            lambda: bool(first.ids(prompt(7, seed=2), 1)) and len(hear(events, seen).get("CPU", ())) >= 13,
            NOTICED_S,
        )
        assert seen["CPU"] <= seen["GPU"]
    assert host.counters()["p2pkv_attach_stored_pages_total"] >= 13
    first.kill()

    # where the node is it finds out by itself
    again = start("auto")
    assert again.ids(tokens) == ids
    assert again.prompt_tokens("external_kv_transfer") == 10 * BLOCK
    assert again.prompt_tokens("local_compute") == 9
    assert again.counted("prefix_blocks_missed") == 0


def hear(events: Any, seen: dict[str, set[object]]) -> dict[str, set[object]]:
    """Return which blocks have ever been told to be where."""
    while events.poll(200):
        for event in msgspec.msgpack.decode(events.recv_multipart()[-1])[1]:
            if event["type"] == "BlockStored":
                seen.setdefault(event["medium"], set()).update(event["block_hashes"])
    return seen


def test_a_prefill_and_a_decode_hand_over_beside_their_hosts_node(
    host: HostsNode, started: list[VLLMServer], tmp_path: Path
) -> None:
    # nobody has said whom to join: both do as the node says, one as its settings have it, one as its environment
    prefill = VLLMServer(
        tmp_path / "prefill.log",
        p2pkv({"node_id": "prefill", "attach": host.attach, "deadline": 5.0}, role="kv_producer"),
    )
    started.append(prefill)
    decode = VLLMServer(
        tmp_path / "decode.log",
        p2pkv({"node_id": "decode", "load_deadline": 15.0}, role="kv_consumer", policy="recompute"),
        environment={"P2PKV_ATTACH": host.attach, "P2PKV_DEADLINE": "5"},
    )
    started.append(decode)
    for server in started:
        server.wait_until_ready()
    eventually(lambda: host.counters()["p2pkv_members"] == 3, NOTICED_S)

    prompts = [prompt(n, seed=1) for n in (7, 33, 257, 1000)]
    alone = [prefill.ids(tokens) for tokens in prompts]
    assert len({tuple(ids) for ids in alone}) == len(alone), (
        "outputs that are all the same would hide wrong KV"
    )
    for tokens, ids in zip(prompts, alone, strict=True):
        assert decode.ids(tokens, params=prefill.prefill(tokens)) == ids
    eventually(lambda: decode.counted("handoffs_loaded") == len(prompts), NOTICED_S)
    assert decode.counted("handoffs_failed") == 0
    assert decode.prompt_tokens("external_kv_transfer") == sum(map(len, prompts))
    assert decode.prompt_tokens("local_compute") == 0
    eventually(lambda: prefill.counted("handoffs_taken") == len(prompts), NOTICED_S)

    # and of a prompt that is not handed off, decode has what prefill has left with their host's node
    tokens = prompt(10 * BLOCK + 9, seed=2)
    published = prefill.counted("prefix_blocks_published")
    ids = prefill.ids(tokens)
    eventually(lambda: prefill.counted("prefix_blocks_published") >= published + 10, NOTICED_S)
    before = decode.prompt_tokens("external_kv_transfer")
    assert decode.ids(tokens) == ids
    assert decode.prompt_tokens("external_kv_transfer") == before + 10 * BLOCK


def test_what_one_life_of_a_server_offloads_the_next_one_loads(
    host: HostsNode, started: list[VLLMServer], tmp_path: Path
) -> None:
    tokens = [3 + i * 7 % 900 for i in range(700)]

    def start() -> VLLMServer:
        settings = {"namespace": "tiny", "attach": host.attach, "node_id": "one", "deadline": 5.0}
        started.append(
            VLLMServer(
                tmp_path / f"one-{len(started)}.log",
                offloading(settings),
                environment={"PYTHONPATH": str(ROOT / "tools" / "engines" / "vllm_cpu")},
                # offloading finds what it has by hashes, which vLLM makes with this alone
                options=["--enable-prefix-caching"],
            )
        )
        started[-1].wait_until_ready()
        return started[-1]

    first = start()
    expected = first.ids(tokens)

    def is_stored() -> bool:
        first.ids(tokens[:40])  # chunks go on to the tier as vLLM takes further steps
        return host.counters().get("p2pkv_attach_stored_pages_total", 0.0) >= 699 // BLOCK

    eventually(is_stored, NOTICED_S)
    first.kill()
    again = start()
    assert again.ids(tokens) == expected
    assert again.prompt_tokens("external_kv_transfer") >= 699 // BLOCK * BLOCK, again.tail()
