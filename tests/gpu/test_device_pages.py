"""Pages in device memory: the promises of publish and fetch hold there as they do in host memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pages
from cluster import UCX, eventually
from device_buffers import DeviceBuffer, EmulatedBuffer
from fake_cuda import FakeCuda
from p2pkv import NotRegisteredError, Pieces, UsageError
from pair import NBYTES, N, Pair, run_all

Allocate = Callable[[int], DeviceBuffer]


@pytest.fixture(params=["shm", "tcp", "attached"])
def pair(request: pytest.FixtureRequest, make_pair: Callable[..., Pair]) -> Pair:
    """The owner's and the reader's staging hold 32 pages, of which a call gets half.

    The owner is a node, or an engine that is attached to one.
    """
    is_attached = request.param == "attached"
    transports = ["shm", "tcp"] if is_attached else [request.param]
    return make_pair(attached=is_attached, transports=transports, device_staging_size=1 << 17)


@pytest.fixture
def destination(pair: Pair, allocate: Allocate) -> DeviceBuffer:
    buffer = allocate(64 * NBYTES)
    pair.reader.register_memory(buffer.array)
    return buffer


@pytest.fixture
def source(pair: Pair, allocate: Allocate) -> DeviceBuffer:
    buffer = allocate(64 * NBYTES)
    pair.owner.register_memory(buffer.array)
    return buffer


def test_pages_arrive_in_device_memory_as_they_were_published(pair: Pair, destination: DeviceBuffer) -> None:
    keys = pair.publish()
    outcomes = pair.reader.fetch(keys, destination.rows(N, NBYTES))
    assert outcomes.all()
    assert np.array_equal(destination.read()[: N * NBYTES].reshape(N, NBYTES), pages.filled(keys, NBYTES))
    counters = pair.reader.counters()
    assert counters['p2pkv_staged_bytes_total{direction="to_device"}'] == N * NBYTES
    assert counters["p2pkv_device_staging_bytes"] == 1 << 17
    assert counters["p2pkv_device_staging_used_bytes"] == 0


@pytest.mark.parametrize("transport", [UCX])
def test_pages_arrive_over_ucx(make_pair: Callable[..., Pair], allocate: Allocate, transport: str) -> None:
    pair = make_pair(transports=[transport])
    destination = allocate(N * NBYTES)
    pair.reader.register_memory(destination.array)
    keys = pair.publish()
    assert pair.reader.fetch(keys, destination.rows(N, NBYTES)).all()
    assert np.array_equal(destination.read().reshape(N, NBYTES), pages.filled(keys, NBYTES))


def test_pages_of_device_memory_arrive_in_host_memory(pair: Pair, source: DeviceBuffer) -> None:
    keys = pair.fresh_keys()
    source.write(pages.filled(keys, NBYTES))
    assert pair.owner.publish(keys, source.rows(N, NBYTES)).all()
    assert pair.fetch_is_right(keys)
    counters = pair.owner.counters()
    ways = ("device_direct", "staged")
    assert sum(counters[f'p2pkv_{way}_bytes_total{{direction="to_host"}}'] for way in ways) == N * NBYTES


def test_a_batch_that_the_staging_can_not_hold_goes_in_rounds(
    pair: Pair, source: DeviceBuffer, destination: DeviceBuffer
) -> None:
    keys = [f"many-{i}" for i in range(64)]  # 256 KiB, through 64 KiB at a time
    source.write(pages.filled(keys, NBYTES))
    assert pair.owner.publish(keys, source.rows(64, NBYTES)).all()
    assert pair.reader.fetch(keys, destination.rows(64, NBYTES)).all()
    assert np.array_equal(destination.read().reshape(64, NBYTES), pages.filled(keys, NBYTES))


def test_pages_of_the_own_pool_arrive_too(pair: Pair, source: DeviceBuffer) -> None:
    keys = pair.publish()
    assert pair.owner.fetch(keys, source.rows(N, NBYTES)).all()
    assert np.array_equal(source.read()[: N * NBYTES].reshape(N, NBYTES), pages.filled(keys, NBYTES))


def test_only_hits_are_written(pair: Pair, destination: DeviceBuffer) -> None:
    keys = pair.publish()
    mixed = [key for pair_of in zip(keys, pair.fresh_keys(), strict=True) for key in pair_of]
    destination.write(np.full(2 * N * NBYTES, 0x5A, np.uint8))
    outcomes = pair.reader.fetch(mixed, destination.rows(2 * N, NBYTES))
    assert outcomes.tolist() == [1, 0] * N
    rows = destination.read()[: 2 * N * NBYTES].reshape(2 * N, NBYTES)
    assert np.array_equal(rows[::2], pages.filled(keys, NBYTES))
    assert (rows[1::2] == 0x5A).all()


def test_pieces_of_device_memory_make_up_a_page(
    pair: Pair, source: DeviceBuffer, destination: DeviceBuffer
) -> None:
    keys = pair.fresh_keys()
    rows = pages.filled(keys, NBYTES)
    half = NBYTES // 2
    source.write(np.concatenate([rows[:, :half].reshape(-1), rows[:, half:].reshape(-1)]))

    def pieces(buffer: DeviceBuffer) -> Pieces:
        first = buffer.address + half * np.arange(N)
        both = np.stack([first, first + N * half], axis=1)
        return Pieces(np.stack([both, np.full_like(both, half)], axis=2).astype(np.int64))

    assert pair.owner.publish(keys, pieces(source)).all()
    assert pair.fetch_is_right(keys)
    assert pair.reader.fetch(keys, pieces(destination)).all()
    there = destination.read()[: 2 * N * half].reshape(2, N, half)
    assert np.array_equal(np.concatenate(there, axis=1), rows)


def test_what_is_published_already_is_not_copied_again(pair: Pair, source: DeviceBuffer) -> None:
    keys = pair.publish()
    source.write(np.zeros(N * NBYTES, np.uint8))  # other bytes: they must not count
    assert pair.owner.publish(keys, source.rows(N, NBYTES)).all()
    assert pair.fetch_is_right(keys)
    assert pair.owner.counters()['p2pkv_staged_bytes_total{direction="to_host"}'] == 0


@pytest.mark.parametrize("attached", [False, True])
def test_the_front_of_a_batch_larger_than_the_pool_stays(
    make_pair: Callable[..., Pair], allocate: Allocate, attached: bool
) -> None:
    pair = make_pair(attached=attached, pool_size=1 << 20, device_staging_size=1 << 18)
    n = 384  # of 256 that fit
    source = allocate(n * NBYTES)
    pair.owner.register_memory(source.array)
    keys = [f"large-{i}" for i in range(n)]
    source.write(pages.filled(keys, NBYTES))
    outcomes = pair.owner.publish(keys, source.rows(n, NBYTES))
    assert outcomes[:128].all()
    assert not outcomes[256:].any()
    # What went for the front of the batch, which an engine's node stores last, is taken out of the directory behind it.
    eventually(lambda: np.array_equal(outcomes, pair.owner.exists(keys)), 30.0)


def test_checksums_are_compared_before_the_pages_go_to_the_device(
    make_pair: Callable[..., Pair], allocate: Allocate
) -> None:
    pair = make_pair(verify="checksum", transports=["tcp"])
    destination = allocate(N * NBYTES)
    pair.reader.register_memory(destination.array)
    keys = pair.publish()
    assert pair.reader.fetch(keys, destination.rows(N, NBYTES)).all()
    assert np.array_equal(destination.read().reshape(N, NBYTES), pages.filled(keys, NBYTES))


def test_an_address_of_device_memory_is_known_as_one(pair: Pair, allocate: Allocate) -> None:
    destination = allocate(N * NBYTES)
    with pair.reader.register_address(destination.address, destination.nbytes):
        keys = pair.publish()
        assert pair.reader.fetch(keys, destination.rows(N, NBYTES)).all()
    assert np.array_equal(destination.read().reshape(N, NBYTES), pages.filled(keys, NBYTES))
    with pytest.raises(UsageError, match="not all of one allocation"):
        pair.reader.register_address(destination.address, 1 << 40)


def test_a_page_may_lie_on_several_devices(emulated: FakeCuda, pair: Pair) -> None:
    keys = pair.publish()
    half = NBYTES // 2
    buffers = [EmulatedBuffer(N * half, device) for device in (0, 1)]
    for buffer in buffers:
        pair.reader.register_memory(buffer.array)
    starts = np.stack([buffer.address + half * np.arange(N) for buffer in buffers], axis=1)
    pieces = Pieces(np.stack([starts, np.full_like(starts, half)], axis=2).astype(np.int64))
    assert pair.reader.fetch(keys, pieces, stream=0).all()
    there = np.concatenate([buffer.read().reshape(N, half) for buffer in buffers], axis=1)
    assert np.array_equal(there, pages.filled(keys, NBYTES))
    for buffer in buffers:
        buffer.close()


def test_calls_share_the_staging(pair: Pair, allocate: Allocate) -> None:
    keys = [pair.publish() for _ in range(4)]
    buffers = [allocate(N * NBYTES) for _ in range(4)]

    def fetch_often(of: list[str], buffer: DeviceBuffer) -> None:
        pair.reader.register_memory(buffer.array)
        for _ in range(5):
            assert pair.reader.fetch(of, buffer.rows(N, NBYTES), timeout=30.0).all()
            assert np.array_equal(buffer.read().reshape(N, NBYTES), pages.filled(of, NBYTES))

    run_all([lambda of=of, to=to: fetch_often(of, to) for of, to in zip(keys, buffers, strict=True)])


def test_calls_that_are_wrong_say_so(pair: Pair, destination: DeviceBuffer, allocate: Allocate) -> None:
    keys = pair.publish()
    other = allocate(N * NBYTES)
    with pytest.raises(NotRegisteredError):
        pair.reader.fetch(keys, other.rows(N, NBYTES))
    host = np.array([[pair.destination.ctypes.data, NBYTES]], np.int64)
    device = np.array([[destination.address, NBYTES]], np.int64)
    with pytest.raises(UsageError, match="others of the call are in host memory"):
        pair.reader.fetch(keys[:2], Pieces(np.stack([host, device])))
    with pytest.raises(UsageError, match="raise device_staging_size"):
        pair.reader.fetch(["large"], destination.rows(1, 64 * NBYTES))
    with pytest.raises(UsageError, match="there is nothing to wait for"):
        pair.reader.fetch(keys, pair.destination, stream=0)
    with pytest.raises(UsageError, match="must be the handle of a CUDA stream"):
        pair.reader.fetch(keys, destination.rows(N, NBYTES), stream=-3)
    with pytest.raises(UsageError, match="was published with 4096 bytes"):
        pair.reader.fetch(keys[:1], destination.rows(1, 2 * NBYTES))
    with pytest.raises(UsageError, match="overlaps"):
        pair.reader.register_memory(destination.array)
    assert pair.reader.fetch(keys, destination.rows(N, NBYTES)).all()
