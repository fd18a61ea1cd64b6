"""What was queued on a stream before a call is done before the call touches device memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from cluster import eventually
from device_buffers import DeviceBuffer, EmulatedBuffer
from fake_cuda import FakeCuda
from pair import NBYTES, N, Pair

Allocate = Callable[[int], DeviceBuffer]


@pytest.fixture(params=["node", "attached"])
def pair(request: pytest.FixtureRequest, make_pair: Callable[..., Pair]) -> Pair:
    """The owner is a node, or an engine that is attached to one."""
    return make_pair(attached=request.param == "attached", transports=["shm"])


def _published_bytes(pair: Pair, keys: list[str]) -> set[int]:
    assert pair.reader.fetch(keys, pair.destination).all()
    return {int(value) for value in np.unique(pair.destination)}


def test_publish_waits_for_the_stream_it_is_given(pair: Pair, allocate: Allocate) -> None:
    source = allocate(N * NBYTES)
    pair.owner.register_memory(source.array)
    keys = pair.fresh_keys()
    stream = source.fill_later(7)
    assert pair.owner.publish(keys, source.rows(N, NBYTES), stream=stream, timeout=30.0).all()
    assert _published_bytes(pair, keys) == {7}


def test_without_the_stream_what_is_not_there_yet_is_published(
    emulated: FakeCuda, pair: Pair, allocate: Allocate
) -> None:
    """The safeguard left out: so the tests beside this one see what they say."""
    source = allocate(N * NBYTES)
    pair.owner.register_memory(source.array)
    keys = pair.fresh_keys()
    emulated.hold(kernels=True)
    source.fill_later(7)
    assert pair.owner.publish(keys, source.rows(N, NBYTES)).all()
    assert _published_bytes(pair, keys) == {0}
    emulated.let_go()  # while the memory is still there


def test_fetch_waits_for_the_stream_it_is_given(pair: Pair, allocate: Allocate) -> None:
    destination = allocate(N * NBYTES)
    pair.reader.register_memory(destination.array)
    keys = pair.publish()
    stream = destination.fill_later(9)  # would write over what came
    assert pair.reader.fetch(keys, destination.rows(N, NBYTES), stream=stream, timeout=30.0).all()
    assert np.array_equal(destination.read().reshape(N, NBYTES), pair.source)


def test_the_stream_that_an_array_names_is_waited_for(
    emulated: FakeCuda, pair: Pair, allocate: Allocate
) -> None:
    source = allocate(N * NBYTES)
    assert isinstance(source, EmulatedBuffer)
    pair.owner.register_memory(source.array)
    keys = pair.fresh_keys()
    rows = source.rows(N, NBYTES, stream=source.fill_later(5))
    assert pair.owner.publish(keys, rows, timeout=30.0).all()
    assert _published_bytes(pair, keys) == {5}


def test_the_producer_of_a_dlpack_tensor_is_asked_to_order_its_work(
    emulated: FakeCuda, pair: Pair, allocate: Allocate
) -> None:
    source = allocate(N * NBYTES)
    assert isinstance(source, EmulatedBuffer)
    tensor = source.tensor((N, NBYTES))
    pair.owner.register_memory(tensor)
    keys = pair.fresh_keys()
    emulated.launch_fill(
        1, source.address, 3, N * NBYTES, delay_us=50_000
    )  # as the producer would be told to
    assert pair.owner.publish(keys, tensor, timeout=30.0).all()
    assert tensor.streams[-1] == 1
    assert _published_bytes(pair, keys) == {3}


@pytest.mark.parametrize("call", ["publish", "fetch"])
def test_a_stream_that_does_not_get_done_costs_misses_at_the_deadline(
    emulated: FakeCuda, pair: Pair, allocate: Allocate, call: str
) -> None:
    memory = allocate(N * NBYTES)
    pair.owner.register_memory(memory.array)
    keys = pair.fresh_keys() if call == "publish" else pair.publish()
    emulated.hold(kernels=True)
    stream = memory.fill_later(1)
    outcomes = getattr(pair.owner, call)(keys, memory.rows(N, NBYTES), stream=stream, timeout=0.1)
    assert not outcomes.any()
    emulated.let_go()
    assert getattr(pair.owner, call)(keys, memory.rows(N, NBYTES), stream=stream, timeout=30.0).all()


def test_a_call_that_waits_for_a_stream_does_not_keep_the_node_from_closing(
    emulated: FakeCuda, pair: Pair, allocate: Allocate
) -> None:
    memory = allocate(N * NBYTES)
    pair.owner.register_memory(memory.array)
    keys = pair.publish()
    emulated.hold(kernels=True)
    stream = memory.fill_later(1)
    before = emulated.counts().events
    outcomes: list[np.ndarray] = []

    def fetch() -> None:
        outcomes.append(pair.owner.fetch(keys, memory.rows(N, NBYTES), stream=stream, timeout=3600.0))

    thread = threading.Thread(target=fetch)
    thread.start()
    eventually(lambda: emulated.counts().events > before, 30.0)  # it waits
    pair.owner.close()
    thread.join(30.0)
    assert [outcome.any() for outcome in outcomes] == [False]
    emulated.let_go()


def test_a_stream_that_is_none_costs_misses_and_is_counted(
    emulated: FakeCuda, pair: Pair, allocate: Allocate
) -> None:
    memory = allocate(N * NBYTES)
    pair.owner.register_memory(memory.array)
    keys = pair.publish()
    assert not pair.owner.fetch(keys, memory.rows(N, NBYTES), stream=0xDEAD).any()
    assert pair.owner.counters()['p2pkv_missed_pages_total{reason="device"}'] == N
