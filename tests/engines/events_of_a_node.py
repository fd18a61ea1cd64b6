"""What a node tells of two pages, in memory and on disk, as an engine's own classes decode it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from p2pkv import Config, Node, page_key

_DECODER = Path(__file__).with_name("decode_kv_events.py")
_PAGE = 4096
_LOOPBACK = "tcp://127.0.0.1:0"


def check_decoded(
    venv: Path, module: str, hashes: str, folder: Path, *, environment: Mapping[str, str] | None = None
) -> None:
    """Have ``module`` of ``venv`` decode what a node says with ``kv_events_hashes``; it must say what happened.

    ``folder`` is for the node's disk. The environment is the decoder's whole one, if there is one.
    """
    shown = {name: _shown(page_key("default", name), hashes) for name in "ab"}
    done = subprocess.run(
        [venv / "bin/python", _DECODER, module],
        input="\n".join(batch.hex() for batch in _batches(folder, hashes)),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    decoded = [json.loads(line) for line in done.stdout.splitlines()]
    assert {batch["rank"] for batch in decoded} == {0}
    events = [event for batch in decoded for event in batch["events"]]
    assert events[0] == ["cleared", "", []]
    told = {(kind, medium, block) for kind, medium, blocks in events for block in blocks}
    assert {("stored", "CPU", shown["a"]), ("stored", "CPU", shown["b"])} <= told
    assert ("removed", "CPU", shown["a"]) in told
    assert ("stored", "STORAGE", shown["b"]) in told


def _shown(key: bytes, hashes: str) -> str | int:
    return key.hex() if hashes == "bytes" else int.from_bytes(key[8:], "big")


def _batches(folder: Path, hashes: str) -> list[bytes]:
    """Publish two pages and retract one; return what was told, from the first batch on."""
    settings: dict[str, Any] = {"pool_size": "1MiB", "kv_events_hashes": hashes}
    settings |= {"disk_size": "8MiB", "disk_path": str(folder / "disk")}
    settings |= {"kv_events": _LOOPBACK, "kv_events_replay": _LOOPBACK}
    memory = np.ones((2, _PAGE), np.uint8)
    context = zmq.Context()
    try:
        with Node.start(Config(node_id="n", **settings)) as node:
            assert node.kv_events_replay_endpoint is not None
            node.register_memory(memory)
            node.publish(["a", "b"], memory)
            asking = context.socket(zmq.DEALER)
            asking.connect(node.kv_events_replay_endpoint)
            node.retract(["a"])
            return _replay_until(asking, lambda told: b"BlockRemoved" in told and told.count(b"STORAGE") > 0)
    finally:
        context.destroy(linger=0)


def _replay_until(asking: zmq.Socket[bytes], is_enough: Callable[[bytes], bool]) -> list[bytes]:
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
