"""vLLM's connector with KV caches in device memory, under vLLM's rules (``vllm_engine.py``)."""

from __future__ import annotations

import numpy as np
import pytest

from device_buffers import EmulatedBuffer
from fake_cuda import FakeCuda
from vllm_fakes import BLOCK, SHAPE
from vllm_on_devices import PREFILL, CacheMemory, OpenEngine, hand_off, load, share_prefix, tokens


def test_blocks_of_a_device_are_stowed_and_its_memory_is_anothers(open_engine: OpenEngine) -> None:
    prefill = open_engine("kv_producer", buddy_pool_size="1MiB", stow_after=0.05)
    decode = open_engine("kv_consumer")
    prompt = tokens(3 * BLOCK + 1)
    given = hand_off(prefill, prompt)
    prefill.step_until(lambda: prefill.is_idle)
    assert prefill.counts["handoffs_stowed"] == 1
    other = prefill.submit(tokens(12 * BLOCK, seed=9))  # is given the blocks that have just come back
    prefill.run(other)
    request = load(decode, prompt, given)
    assert request.loaded_tokens == len(prompt)
    assert decode.is_right(request)
    prefill.step_until(lambda: prefill.counts.get("handoffs_taken") == 1)
    assert prefill.node.counters()["p2pkv_buddy_pool_used_bytes"] == 0


@pytest.mark.parametrize(("from_", "to"), [(True, True), (True, False), (False, True)])
def test_blocks_are_handed_off_byte_for_byte(open_engine: OpenEngine, from_: bool, to: bool) -> None:
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


def test_prefixes_are_shared_between_devices(open_engine: OpenEngine) -> None:
    first, second = open_engine("kv_both"), open_engine("kv_both")
    assert second.is_right(share_prefix(first, second, 6), 6)


def test_what_the_model_still_writes_is_waited_for(emulated: FakeCuda, open_engine: OpenEngine) -> None:
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
    emulated: FakeCuda, open_engine: OpenEngine
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
