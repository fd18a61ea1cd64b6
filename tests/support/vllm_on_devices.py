"""vLLM's connector with KV caches in device memory: instances of one cluster, and what is done with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from device_buffers import DeviceBuffer
from p2pkv.testing.ports import free_port
from vllm_engine import EngineFake
from vllm_fakes import BLOCK, RequestFake

OpenEngine = Callable[..., EngineFake]
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class CacheMemory:
    """A device's memory, and the stream of the engine's kernels."""

    def __init__(self, buffer: DeviceBuffer) -> None:
        self.buffer, self.stream = buffer, 0
        self.address = buffer.address

    def write(self, data: np.ndarray) -> None:
        self.buffer.write(data.reshape(-1))

    def read(self) -> np.ndarray:
        return self.buffer.read()


@pytest.fixture
def open_engine(
    cuda_settings: dict[str, Any], allocate: Callable[[int], DeviceBuffer]
) -> Iterator[OpenEngine]:
    """Open instances of one cluster; ``on_device`` says where their caches are, ``engine`` what they are of."""
    join = f"127.0.0.1:{free_port()}"
    opened: list[EngineFake] = []

    def open_one(
        role: str, *, on_device: bool = True, engine: dict[str, Any] | None = None, **settings: Any
    ) -> EngineFake:
        base = {
            "join": join,
            "pool_size": "1MiB",
            "node_id": f"node{len(opened)}",
            # of which a quiet machine takes none
            "load_deadline": 60.0,
            "deadline": 30.0,
            "device_staging_size": 65536,
        }
        make = (lambda nbytes: CacheMemory(allocate(nbytes))) if on_device else None
        opened.append(EngineFake(base | cuda_settings | settings, role=role, allocate=make, **engine or {}))
        nodes = [node for engine in opened for node in engine.nodes]
        eventually(lambda: all(len(node.members()) == len(nodes) for node in nodes), 20.0)
        return opened[-1]

    yield open_one
    while opened:  # what an engine still offers keeps its device open for as long as the engine is there
        opened.pop().close()


def tokens(n: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + i for i in range(n)]


def hand_off(prefill: EngineFake, prompt: list[int]) -> dict[str, Any]:
    answer = prefill.run(prefill.submit(prompt, PREFILL)).answer
    assert answer is not None
    prefill.step()
    return answer


def load(decode: EngineFake, prompt: list[int], given: dict[str, Any]) -> RequestFake:
    request = decode.submit(prompt, given)
    decode.step()
    decode.step_until(lambda: request.state != "loading")
    return request


def share_prefix(first: EngineFake, second: EngineFake, n_blocks: int) -> RequestFake:
    """Have ``second`` load a prefix of so many blocks that ``first`` has published; return its request.

    A miss is no fault: an owner that is silent for a moment, as one on a busy machine may be, is not waited for. Then
    another prompt is tried.
    """
    for seed in range(20):
        prompt = tokens(n_blocks * BLOCK + 1, seed)
        first.run(first.submit(prompt))
        n_published = n_blocks * (seed + 1)
        eventually(lambda n=n_published: first.node.counters()["p2pkv_published_pages_total"] == n, 10.0)
        request = second.submit(prompt)
        second.step_until(lambda request=request: request.state in ("loading", "finished"))
        second.step_until(lambda request=request: request.state != "loading")
        if request.loaded_tokens == n_blocks * BLOCK:
            return request
        second.run(request)
    raise AssertionError("each of 20 prefixes was missed")
