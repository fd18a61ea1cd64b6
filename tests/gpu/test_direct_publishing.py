"""Devices write pages to where they are to lie in the own pool, and nobody sees one before it is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from device_buffers import DeviceBuffer
from fake_cuda import FakeCuda, fake_cuda
from p2pkv import Pieces, _native
from p2pkv.pool import Pool, PoolStatus
from pair import NBYTES, N, Pair
from threads import in_a_thread

Allocate = Callable[[int], DeviceBuffer]
PATIENCE = 30.0
INVALID_VALUE = 1
KEYS = np.arange(16 * N, dtype=np.uint8).reshape(N, 16)


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair(transports=["shm"])


@pytest.fixture
def source(pair: Pair, allocate: Allocate) -> DeviceBuffer:
    """Device memory that the owner knows, with bytes of its own in every page."""
    memory = allocate(N * NBYTES)
    memory.write(_rows())
    pair.owner.register_memory(memory.array)
    return memory


@pytest.fixture
def pieces(allocate: Allocate) -> np.ndarray:
    """Pages in device memory, for calls past any node."""
    memory = allocate(N * NBYTES)
    memory.write(_rows())
    pieces = np.zeros((N, 1, 2), np.int64)
    pieces[:, 0, 0] = memory.address + np.arange(N) * NBYTES
    pieces[:, 0, 1] = NBYTES
    return pieces


@pytest.fixture
def make_lifting(kind: str, pieces: np.ndarray) -> Callable[[], _native.CudaLifting]:
    def make() -> _native.CudaLifting:
        if kind == "emulated":
            _native.cuda_use_library(fake_cuda().path)
        return _native.CudaLifting([_native.CudaDevice.open(0)], np.zeros((N, 1), np.int32), pieces, 1 << 30)

    return make


def _rows(n: int = N, nbytes: int = NBYTES) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (n, nbytes), np.uint8)


def _went(pair: Pair) -> tuple[float, float]:
    """Bytes that went from devices straight into the owner's pool, and through its staging."""
    counters = pair.owner.counters()
    return (
        counters['p2pkv_device_direct_bytes_total{direction="to_host"}'],
        counters['p2pkv_staged_bytes_total{direction="to_host"}'],
    )


def _is_right(pair: Pair, keys: list[str], rows: np.ndarray) -> bool:
    """Whether a peer gets every page, byte for byte, its checksum included."""
    back = np.zeros_like(rows)
    with pair.reader.register_memory(back):
        return bool(pair.reader.fetch(keys, back, timeout=PATIENCE).all()) and np.array_equal(back, rows)


def test_pages_are_written_where_they_are_to_lie(pair: Pair, source: DeviceBuffer) -> None:
    keys = pair.fresh_keys()
    assert pair.owner.publish(keys, source.rows(N, NBYTES)).all()
    assert _went(pair) == (N * NBYTES, 0)
    assert _is_right(pair, keys, _rows())


@pytest.mark.parametrize("blocks", [0, 4])
def test_pages_of_scattered_pieces_are_put_together(
    make_pair: Callable[..., Pair], allocate: Allocate, blocks: int
) -> None:
    """Pieces of three lengths, those of a page far apart and in another order than they lie in."""
    pair = make_pair(transports=["tcp"], verify="generation", device_kernel_blocks=blocks)
    memory = allocate(2 * N * NBYTES)
    pair.owner.register_memory(memory.array)
    whole = _rows(2 * N)
    memory.write(whole)
    lengths = [16, 1000, NBYTES - 1016]
    pieces = np.zeros((N, 3, 2), np.int64)
    expected = np.zeros((N, NBYTES), np.uint8)
    for page in range(N):
        row, at = 2 * (N - 1 - page), 0
        for k, nbytes in enumerate(lengths):
            begin = (row + k % 2) * NBYTES + 1024 * k
            begin = min(begin, 2 * N * NBYTES - nbytes)
            pieces[page, k] = memory.address + begin, nbytes
            expected[page, at : at + nbytes] = whole.reshape(-1)[begin : begin + nbytes]
            at += nbytes
    keys = pair.fresh_keys()
    assert pair.owner.publish(keys, Pieces(pieces)).all()
    assert _went(pair) == (N * NBYTES, 0)
    assert _is_right(pair, keys, expected)


def test_a_checksum_is_of_what_the_device_has_written(
    make_lifting: Callable[[], _native.CudaLifting], pieces: np.ndarray
) -> None:
    """A reader that compares it would else find every page wrong."""
    pool = Pool(1 << 20, owner=1, boot=1)
    published = pool.publish(KEYS, pieces, lifting=make_lifting())
    assert (published.statuses == PoolStatus.STORED).all()
    expected = [_native.checksum(row.ctypes.data, NBYTES) for row in _rows()]
    assert published.locations["checksum"].tolist() == expected
    assert pool.release_memory()


def test_nobody_sees_a_page_before_it_is_whole(emulated: FakeCuda, pair: Pair, source: DeviceBuffer) -> None:
    keys = pair.fresh_keys()
    before = emulated.counts().queued
    emulated.hold(copies=True)
    thread, outcomes = in_a_thread(lambda: pair.owner.publish(keys, source.rows(N, NBYTES), timeout=PATIENCE))
    eventually(lambda: emulated.counts().queued > before, PATIENCE)
    assert not pair.owner.exists(keys).any()
    assert not pair.reader.exists(keys).any()
    emulated.let_go()
    thread.join(PATIENCE)
    assert outcomes[0].all()
    assert _is_right(pair, keys, _rows())


def test_pages_that_come_meanwhile_get_other_places(
    emulated: FakeCuda, pair: Pair, source: DeviceBuffer
) -> None:
    """The pool is filled twice over while a device is about to write: where it writes nobody else may be."""
    keys = pair.fresh_keys()
    before = emulated.counts().queued
    emulated.hold(copies=True)
    thread, outcomes = in_a_thread(lambda: pair.owner.publish(keys, source.rows(N, NBYTES), timeout=PATIENCE))
    eventually(lambda: emulated.counts().queued > before, PATIENCE)
    others = [pair.publish() for _ in range(2 * (1 << 20) // (N * NBYTES))]
    emulated.let_go()
    thread.join(PATIENCE)
    assert outcomes[0].all()
    assert _is_right(pair, keys, _rows())
    assert pair.fetch_is_right(others[-1])


def test_what_a_device_fails_to_write_is_staged(emulated: FakeCuda, pair: Pair, source: DeviceBuffer) -> None:
    keys = pair.fresh_keys()
    emulated.fail("cuMemcpyDtoHAsync", INVALID_VALUE)
    assert pair.owner.publish(keys, source.rows(N, NBYTES)).all()
    assert _went(pair) == (0, N * NBYTES)
    assert _is_right(pair, keys, _rows())
    assert pair.owner.counters()["p2pkv_pool_used_bytes"] == N * NBYTES  # no block was lost on the way


def test_a_driver_that_refuses_to_lock_the_pool_costs_the_staging(
    emulated: FakeCuda, pair: Pair, source: DeviceBuffer
) -> None:
    keys = pair.fresh_keys()
    emulated.fail("cuMemHostRegister", INVALID_VALUE)
    assert pair.owner.publish(keys, source.rows(N, NBYTES)).all()
    assert _went(pair) == (0, N * NBYTES)
    assert _is_right(pair, keys, _rows())
    assert pair.owner.counters()["p2pkv_pool_used_bytes"] == N * NBYTES


def test_what_may_not_be_locked_is_staged_in_the_same_call(
    make_pair: Callable[..., Pair], allocate: Allocate
) -> None:
    """Half of the setting may be locked by publishes: some pages go one way then, and the others the other."""
    pair = make_pair(transports=["shm"], pool_size=64 << 20, device_direct_size=32 << 20)
    n, nbytes = 40, 1 << 20
    memory = allocate(n * nbytes)
    rows = _rows(n, nbytes)
    memory.write(rows)
    pair.owner.register_memory(memory.array)
    keys = [f"large {i}" for i in range(n)]
    assert pair.owner.publish(keys, memory.rows(n, nbytes), timeout=PATIENCE).all()
    direct, staged = _went(pair)
    assert direct + staged == n * nbytes
    assert direct > 0
    assert staged > 0
    assert _is_right(pair, keys, rows)


def test_a_block_that_a_lost_device_may_write_to_is_nobodys_again(
    emulated: FakeCuda, make_pair: Callable[..., Pair], allocate: Allocate
) -> None:
    pair = make_pair(transports=["shm"])
    source = allocate(N * NBYTES)
    pair.owner.register_memory(source.array)
    keys = pair.fresh_keys()
    before = emulated.counts().queued
    emulated.hold(copies=True)
    thread, outcomes = in_a_thread(lambda: pair.owner.publish(keys, source.rows(N, NBYTES), timeout=PATIENCE))
    eventually(lambda: emulated.counts().queued > before, PATIENCE)
    emulated.lose()
    thread.join(PATIENCE)
    assert not outcomes[0].any()
    assert not pair.reader.exists(keys).any()
    counters = pair.owner.counters()
    assert (counters["p2pkv_pool_pages"], counters["p2pkv_pool_used_bytes"]) == (0, N * NBYTES)
    assert counters["p2pkv_device_staging_lost_bytes"] == 0
    assert counters['p2pkv_unpublished_pages_total{reason="device"}'] == N
    for _ in range(2 * (1 << 20) // (N * NBYTES)):  # more than the pool holds: each place is used that may be
        host_keys = pair.publish()
    assert pair.fetch_is_right(host_keys)
    assert pair.owner.counters()["p2pkv_pool_used_bytes"] == 1 << 20
    assert pair.owner.counters()["p2pkv_pool_pages"] == (1 << 20) // NBYTES - N


def test_a_publish_returns_only_when_its_copies_have_ended(
    emulated: FakeCuda, pair: Pair, source: DeviceBuffer
) -> None:
    keys = pair.fresh_keys()
    emulated.delay_copies(300_000)  # longer than the call may take
    outcomes = pair.owner.publish(keys, source.rows(N, NBYTES), timeout=0.25)
    assert emulated.counts().queued == 0
    assert np.array_equal(outcomes, pair.owner.exists(keys))
    used = pair.owner.counters()["p2pkv_pool_used_bytes"]
    assert used == int(outcomes.sum()) * NBYTES


@pytest.mark.parametrize(
    "settings", [{"device_direct_size": 0}, {"verify": "checksum"}, {"compression": "lossless"}]
)
def test_pages_are_staged_where_devices_are_not_to_have_the_pool(
    make_pair: Callable[..., Pair], allocate: Allocate, settings: dict[str, Any]
) -> None:
    pair = make_pair(transports=["shm"], **settings)
    memory = allocate(N * NBYTES)
    memory.write(_rows())
    pair.owner.register_memory(memory.array)
    keys = pair.fresh_keys()
    assert pair.owner.publish(keys, memory.rows(N, NBYTES)).all()
    assert _went(pair) == (0, N * NBYTES)
    assert _is_right(pair, keys, _rows())


def test_memory_that_a_successor_may_go_on_with_is_not_written_by_devices(
    make_lifting: Callable[[], _native.CudaLifting], pieces: np.ndarray
) -> None:
    pool = Pool(1 << 20, owner=1, boot=1, is_kept=True)
    assert not pool.takes_given
    with pytest.raises(ValueError, match="takes no pages of devices"):
        pool.publish(KEYS, pieces, lifting=make_lifting())
    assert pool.release_memory()


def test_pages_of_another_number_than_the_keys_are_refused(
    make_lifting: Callable[[], _native.CudaLifting], pieces: np.ndarray
) -> None:
    pool = Pool(1 << 20, owner=1, boot=1)
    with pytest.raises(ValueError, match="or not so many of these"):
        pool.publish(KEYS[1:], pieces[1:], lifting=make_lifting())
    assert pool.release_memory()
