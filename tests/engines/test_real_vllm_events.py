"""What a node sends as KV events is what vLLM's own decoder reads: ``make test-vllm``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zmq

from demo.xpyd.real_engines import VLLM
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
    for _ in range(500):
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
