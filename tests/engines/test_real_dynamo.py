"""Dynamo's own indexer follows the KV events of an engine with p2pkv, and knows what is in p2pkv's memory.

Part of ``make test-vllm``. An engine of the tests' own makes the same events without vLLM.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from dynamo_indexer import PYTHON, DynamoIndexer
from vllm_server import VLLMServer, p2pkv

from cluster import eventually
from demo.xpyd.real_engines import VLLM, lasting_port
from vllm_engine import EngineFake
from vllm_fakes import BLOCK

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not PYTHON.exists(), reason="Dynamo's runtime is not installed: make test-vllm does it"
    ),
]


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[DynamoIndexer]:
    with DynamoIndexer(tmp_path / "indexer.log") as started:
        yield started


class _Publisher:
    """Sends events of the tests' engine as vLLM sends its own."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._number = 0

    def wait(self) -> None:
        """Wait until somebody follows."""
        assert self._socket.poll(60_000)
        self._socket.recv()

    def send(self, events: list[Any]) -> None:
        told = []
        for event in events:
            kind = "BlockStored" if hasattr(event, "token_ids") else "BlockRemoved"
            hashes = [_number(block_hash) for block_hash in event.block_hashes]
            shown = {**vars(event), "type": kind, "block_hashes": hashes}
            if shown.get("parent_block_hash") is not None:
                shown["parent_block_hash"] = _number(shown["parent_block_hash"])
            told.append(shown)
        batch = msgspec.msgpack.encode([time.time(), told, 0])
        self._socket.send_multipart((b"", struct.pack(">q", self._number), batch))
        self._number += 1


def _number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def test_dynamos_indexer_knows_what_is_in_p2pkvs_memory(indexer: DynamoIndexer) -> None:
    tokens = list(range(6 * BLOCK))
    longer = [*tokens, *range(9000, 9000 + 2 * BLOCK)]
    engine = EngineFake({"node_id": "one", "pool_size": "1MiB"}, tells_events=True)
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        publisher = _Publisher(socket)
        indexer.register(7, publisher.endpoint, block_size=BLOCK)
        publisher.wait()

        def follow() -> None:
            if events := engine.scheduler.take_events():
                publisher.send(events)

        def knows(n_tokens: int) -> bool:
            follow()
            return indexer.tokens_at(7, longer) == (0, n_tokens)

        try:
            engine.run(engine.submit(tokens))
            engine.step_until(lambda: knows(len(tokens)), 60.0)
            engine.run(engine.submit(longer))
            engine.step_until(lambda: knows(len(longer)), 60.0)
            engine.scheduler.reset_cache()
            engine.step_until(lambda: knows(0), 60.0)
        finally:
            engine.close()


def test_dynamos_indexer_follows_the_blocks_of_a_vllm_with_p2pkv(
    indexer: DynamoIndexer, tmp_path: Path
) -> None:
    endpoint, replay = (f"tcp://127.0.0.1:{lasting_port()}" for _ in range(2))
    told = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint.replace("127.0.0.1", "*"),
        "replay_endpoint": replay.replace("127.0.0.1", "*"),
    }
    server = VLLMServer(
        tmp_path / "server.log",
        p2pkv({"node_id": "one", "pool_size": "8MiB"}, role="kv_both", policy="recompute"),
        options=[
            "--enable-prefix-caching",
            "--max-model-len=256",
            "--num-gpu-blocks-override=16",
            "--kv-events-config",
            json.dumps(told),
        ],
    )
    n_whole = 3 * VLLM.BLOCK

    def prompt(seed: int) -> list[int]:
        chooser = Random(seed)
        return [chooser.randrange(300, 4000) for _ in range(n_whole + 5)]

    def ask(seed: int) -> None:
        server.complete(prompt(seed), 8)

    try:
        server.wait_until_ready()
        indexer.register(7, endpoint, block_size=VLLM.BLOCK, replay=replay)
        eventually(lambda: ask(1) or indexer.tokens_at(7, prompt(1))[0] >= n_whole, 120.0)  # type: ignore[func-returns-value]
    finally:
        server.kill()
