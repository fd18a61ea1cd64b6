"""KV events: vLLM's own decoder reads a node's, and vLLM's own stream tells of p2pkv's: ``make test-vllm``."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import msgspec
import pytest
import zmq
from events_of_a_node import check_decoded
from vllm_server import BLOCK, VLLMServer, p2pkv

from cluster import eventually
from demo.xpyd.real_engines import VLLM, lasting_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("hashes", ["bytes", "numbers"])
def test_vllm_decodes_what_a_node_sends(hashes: str, tmp_path: Path) -> None:
    check_decoded(VLLM.VENV, "vllm.distributed.kv_events", hashes, tmp_path)


def test_vllms_own_events_tell_of_blocks_in_p2pkvs_memory(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{lasting_port()}"
    told = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint.replace("127.0.0.1", "*"),
    }
    options = ["--enable-prefix-caching", "--kv-events-config", json.dumps(told)]
    server = VLLMServer(
        tmp_path / "server.log",
        p2pkv({"node_id": "one", "pool_size": "1MiB"}, role="kv_both", policy="recompute"),
        options=options,
    )
    there: dict[str, set[object]] = {"GPU": set(), "CPU": set()}
    seen: dict[str, set[object]] = {"GPU": set(), "CPU": set()}
    with zmq.Context() as context, context.socket(zmq.SUB) as events:
        events.subscribe(b"")
        events.connect(endpoint)

        def follow() -> None:
            while events.poll(200):
                for event in msgspec.msgpack.decode(events.recv_multipart()[-1])[1]:
                    hashes = set(event["block_hashes"])  # bytes or, by vLLM's default, numbers
                    if event["type"] == "BlockStored":
                        there[event["medium"]] |= hashes
                        seen[event["medium"]] |= hashes
                    elif event["type"] == "BlockRemoved":
                        there[event["medium"]] -= hashes

        def ask(seed: int, n_blocks: int) -> None:
            random = Random(seed)
            server.complete([random.randrange(300, 4000) for _ in range(n_blocks * BLOCK + 5)], 8)
            follow()

        try:
            server.wait_until_ready()
            # the same hashes as of vLLM's own blocks, each time some step or other later
            eventually(lambda: ask(1, 3) or len(seen["CPU"]) >= 3, 60.0)  # type: ignore[func-returns-value]
            assert seen["CPU"] <= seen["GPU"]
            first = set(there["CPU"])
            # a pool of 1 MiB gives blocks up before long, and vLLM's cache does not
            for seed in range(2, 12):
                ask(seed, 3)
            eventually(lambda: ask(1, 0) or not first <= there["CPU"], 60.0)  # type: ignore[func-returns-value]
            assert first <= there["GPU"]
            assert there["CPU"] <= there["GPU"]
        finally:
            server.kill()
