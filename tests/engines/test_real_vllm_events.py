"""KV events: vLLM's own decoder reads a node's, and vLLM's own stream tells of p2pkv's: ``make test-vllm``."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import zmq
from vllm_server import BLOCK, VLLMServer, p2pkv

from cluster import eventually
from demo.xpyd.real_engines import VLLM, lasting_port
from p2pkv import Config, Node, page_key

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

_DECODER = Path(__file__).with_name("decode_kv_events.py")
_PAGE = 4096
_LOOPBACK = "tcp://127.0.0.1:0"


def test_vllm_decodes_what_a_node_sends(tmp_path: Path) -> None:
    disk = {"disk_size": "8MiB", "disk_path": str(tmp_path / "disk")}
    memory = np.ones((2, _PAGE), np.uint8)
    context = zmq.Context()
    with Node.start(
        Config(node_id="n", pool_size="1MiB", kv_events=_LOOPBACK, kv_events_replay=_LOOPBACK, **disk)  # type: ignore[arg-type]
    ) as node:
        assert node.kv_events_replay_endpoint is not None
        node.register_memory(memory)
        node.publish(["a", "b"], memory)
        asking = context.socket(zmq.DEALER)
        asking.connect(node.kv_events_replay_endpoint)
        a, b = (page_key("default", name).hex() for name in "ab")
        node.retract(["a"])
        batches = replay_until(asking, lambda told: b"BlockRemoved" in told and told.count(b"STORAGE") > 0)
    context.destroy(linger=0)
    done = subprocess.run(
        [VLLM.VENV / "bin/python", _DECODER],
        input="\n".join(batch.hex() for batch in batches),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    decoded = [json.loads(line) for line in done.stdout.splitlines()]
    assert {batch["rank"] for batch in decoded} == {0}
    events = [event for batch in decoded for event in batch["events"]]
    assert events[0] == ["cleared", "", []]
    told = {(kind, medium, key) for kind, medium, keys in events for key in keys}
    assert {("stored", "CPU", a), ("stored", "CPU", b), ("removed", "CPU", a)} <= told
    assert ("stored", "STORAGE", b) in told


def replay_until(asking: zmq.Socket[bytes], is_enough: Callable[[bytes], bool]) -> list[bytes]:
    """Ask for everything again and again, until what came satisfies ``is_enough``."""
    until = time.monotonic() + 60.0  # on a busy machine the disk takes its time
    while time.monotonic() < until:
        batches: list[bytes] = []
        asking.send_multipart((b"", bytes(8)))
        while True:
            assert asking.poll(10_000), "no answer within 10 s"
            _, _, sequence, batch = asking.recv_multipart()
            if sequence == b"\xff" * 8:
                break
            batches.append(batch)
        if is_enough(b"".join(batches)):
            return batches
    raise AssertionError(f"{len(batches)} batches, and not what was waited for")


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
