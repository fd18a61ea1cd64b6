"""vLLM's connector with KV caches in device memory, under vLLM's rules (``vllm_engine.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from device_buffers import DeviceBuffer, EmulatedBuffer
from fake_cuda import FakeCuda
from p2pkv.testing.ports import free_port
from vllm_engine import EngineFake
from vllm_fakes import BLOCK, SHAPE, RequestFake

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
) -> Iterator[Callable[..., EngineFake]]:
    """Open instances of one cluster; ``on_device`` says where their caches are."""
    join = f"127.0.0.1:{free_port()}"
    opened: list[EngineFake] = []

    def open_one(role: str, *, on_device: bool = True, **settings: Any) -> EngineFake:
        base = {
            "join": join,
            "pool_size": "1MiB",
            "node_id": f"node{len(opened)}",
            "load_deadline": 5.0,
            "deadline": 5.0,
            "device_staging_size": 65536,
        }
        make = (lambda nbytes: CacheMemory(allocate(nbytes))) if on_device else None
        opened.append(EngineFake(base | cuda_settings | settings, role=role, allocate=make))
        nodes = [node for engine in opened for node in engine.nodes]
        eventually(lambda: all(len(node.members()) == len(nodes) for node in nodes), 20.0)
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


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


@pytest.mark.parametrize(("from_", "to"), [(True, True), (True, False), (False, True)])
def test_blocks_are_handed_off_byte_for_byte(
    open_engine: Callable[..., EngineFake], from_: bool, to: bool
) -> None:
    prefill = open_engine("kv_producer", on_device=from_)
    decode = open_engine("kv_consumer", on_device=to)
    for seed, n in enumerate((1, 5 * BLOCK, 40 * BLOCK + 3)):
        request = load(decode, tokens(n, seed), hand_off(prefill, tokens(n, seed)))
        assert request.loaded_tokens == n
        assert decode.is_right(request)
        decode.run(request)
        prefill.step_until(lambda: prefill.is_idle)
    assert decode.counts["handoffs_loaded"] == 3
    staged = prefill.node.counters()["p2pkv_staged_to_host_bytes_total"]
    assert (staged > 0) == from_


def test_prefixes_are_shared_between_devices(open_engine: Callable[..., EngineFake]) -> None:
    first, second = open_engine("kv_both"), open_engine("kv_both")
    prompt = tokens(6 * BLOCK + 1)
    first.run(first.submit(prompt))
    eventually(lambda: first.node.counters()["p2pkv_published_pages_total"] == 6, 10.0)
    request = second.submit(prompt)
    second.step_until(lambda: request.state in ("loading", "finished"))
    second.step_until(lambda: request.state != "loading")
    assert request.loaded_tokens == 6 * BLOCK
    assert second.is_right(request, 6)


def test_what_the_model_still_writes_is_waited_for(
    emulated: FakeCuda, open_engine: Callable[..., EngineFake]
) -> None:
    prefill, decode = open_engine("kv_producer"), open_engine("kv_consumer")
    for engine in (prefill, decode):
        assert isinstance(engine.memory, CacheMemory)
        assert isinstance(engine.memory.buffer, EmulatedBuffer)
        engine.memory.stream = emulated.stream()
    prompt = tokens(2 * BLOCK)
    answer = prefill.run(prefill.submit(prompt, PREFILL)).answer
    assert answer is not None
    # the last kernels of the step run when the next one begins, and decode clears the blocks it gives out
    memory, cleared = prefill.memory, decode.memory
    assert memory is not None
    assert cleared is not None
    nbytes = len(memory.read())
    emulated.launch_fill(memory.stream, memory.address, 7, nbytes, delay_us=50_000)
    prefill.step()
    emulated.launch_fill(cleared.stream, cleared.address, 9, nbytes, delay_us=150_000)
    request = load(decode, prompt, answer)
    assert request.loaded_tokens == 2 * BLOCK
    block = int(np.prod(SHAPE)) * 4
    loaded = cleared.read().reshape(-1, 64, block)[:, request.block_ids]
    assert np.unique(loaded).tolist() == [7]
    for engine_memory in (memory, cleared):
        emulated.destroy_stream(engine_memory.stream)


def test_a_device_that_fails_fails_the_load_and_not_the_engine(
    emulated: FakeCuda, open_engine: Callable[..., EngineFake]
) -> None:
    prefill, decode = open_engine("kv_producer"), open_engine("kv_consumer")
    given = hand_off(prefill, tokens(2 * BLOCK, 1))
    for call in ("cuMemcpyHtoDAsync", "cuMemcpyBatchAsync"):
        emulated.fail(call, 2, stays=True)
    request = decode.submit(tokens(2 * BLOCK, 1), given)
    decode.run(request)
    assert decode.counts["handoffs_failed"] == 1
    emulated.reset()
    prompt = tokens(2 * BLOCK, 2)
    assert decode.is_right(load(decode, prompt, hand_off(prefill, prompt)))
