"""Devices copy pages from where they lie in pools of this host, and what they have copied is proven."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from device_buffers import DeviceBuffer
from fake_cuda import FakeCuda, fake_cuda
from p2pkv import Pieces
from p2pkv.errors import UsageError
from pair import NBYTES, N, Pair

Allocate = Callable[[int], DeviceBuffer]
PATIENCE = 30.0


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair(transports=["shm"])


@pytest.fixture
def destination(pair: Pair, allocate: Allocate) -> DeviceBuffer:
    """Device memory that both nodes know."""
    memory = allocate(N * NBYTES)
    for node in pair.nodes:
        node.register_memory(memory.array)
    return memory


def _direct(pair: Pair, of: str = "reader", direction: str = "to_device") -> float:
    return getattr(pair, of).counters()[f'p2pkv_device_direct_bytes_total{{direction="{direction}"}}']


def _staged(pair: Pair, of: str = "reader") -> float:
    return getattr(pair, of).counters()['p2pkv_staged_bytes_total{direction="to_device"}']


def _arrives(pair: Pair, keys: list[str], destination: DeviceBuffer, of: str = "reader") -> bool:
    destination.write(np.zeros(N * NBYTES, np.uint8))
    outcomes = getattr(pair, of).fetch(keys, destination.rows(N, NBYTES), timeout=PATIENCE)
    return bool(outcomes.all()) and np.array_equal(destination.read().reshape(N, NBYTES), pair.source)


def _warm(pair: Pair, destination: DeviceBuffer) -> None:
    """Have the peer's pool mapped, which the first read of it does; that one is staged."""
    assert _arrives(pair, pair.publish(), destination)


def test_pages_of_the_own_pool_are_not_staged(pair: Pair, destination: DeviceBuffer) -> None:
    keys = pair.publish()
    assert _arrives(pair, keys, destination, of="owner")
    assert (_direct(pair, "owner"), _staged(pair, "owner")) == (N * NBYTES, 0)


def test_pages_of_a_peers_pool_are_not_staged_once_it_is_mapped(
    pair: Pair, destination: DeviceBuffer
) -> None:
    _warm(pair, destination)
    staged = _staged(pair)
    keys = pair.publish()
    assert pair.reader.exists(keys).all()  # which asks where they lie
    assert _arrives(pair, keys, destination)
    assert (_direct(pair), _staged(pair)) == (N * NBYTES, staged)


def test_pages_that_lie_elsewhere_come_with_the_others(pair: Pair, destination: DeviceBuffer) -> None:
    """Half of them is the reader's own, and half is nobody's whose pool it has mapped."""
    keys = pair.publish()
    rows = pair.source[: N // 2].copy()
    with pair.reader.register_memory(rows):
        assert pair.reader.publish(keys[: N // 2], rows).all()
    assert _arrives(pair, keys, destination)
    assert (_direct(pair), _staged(pair)) == (N // 2 * NBYTES, N // 2 * NBYTES)


@pytest.mark.parametrize("settings", [{"device_direct_size": 0}, {"verify": "checksum"}])
def test_pages_are_staged_where_devices_are_not_to_have_the_pool(
    make_pair: Callable[..., Pair], allocate: Allocate, settings: dict[str, Any]
) -> None:
    pair = make_pair(transports=["shm"], **settings)
    memory = allocate(N * NBYTES)
    pair.owner.register_memory(memory.array)
    assert _arrives(pair, pair.publish(), memory, of="owner")
    assert (_direct(pair, "owner"), _staged(pair, "owner")) == (0, N * NBYTES)


def test_a_driver_that_refuses_to_lock_a_pool_costs_the_staging(
    emulated: FakeCuda, pair: Pair, destination: DeviceBuffer
) -> None:
    emulated.fail("cuMemHostRegister", 1)
    assert _arrives(pair, pair.publish(), destination, of="owner")
    assert (_direct(pair, "owner"), _staged(pair, "owner")) == (0, N * NBYTES)


def test_a_page_that_its_owner_replaces_while_a_device_copies_it_is_no_hit(
    emulated: FakeCuda, pair: Pair, destination: DeviceBuffer
) -> None:
    _warm(pair, destination)
    keys = pair.publish()
    assert pair.reader.exists(keys).all()
    before = emulated.counts().queued
    emulated.hold(copies=True)
    outcomes: list[np.ndarray] = []
    thread = threading.Thread(
        target=lambda: outcomes.append(pair.reader.fetch(keys, destination.rows(N, NBYTES), timeout=PATIENCE))
    )
    thread.start()
    eventually(lambda: emulated.counts().queued > before, PATIENCE)  # the device is about to read
    assert pair.owner.retract(keys).all()
    emulated.let_go()
    thread.join(PATIENCE)
    assert [outcome.any() for outcome in outcomes] == [False]
    assert _direct(pair) == 0


def test_pages_that_were_locked_apart_come_whole(make_pair: Callable[..., Pair], allocate: Allocate) -> None:
    """A pool is locked in chunks of 16 MiB. Pages lie across their bounds, and side by side here and there."""
    n, nbytes = 37, (1 << 20) + 4096
    pair = make_pair(transports=["shm"], pool_size="64MiB")
    source = np.random.default_rng(5).integers(0, 256, (n, nbytes), np.uint8)
    memory = allocate(n * nbytes)
    keys = [f"large {i}" for i in range(n)]
    pair.owner.register_memory(source)
    for node in pair.nodes:
        node.register_memory(memory.array)
    assert pair.owner.publish(keys, source).all()
    for of in ("owner", "reader", "reader"):
        memory.write(np.zeros(n * nbytes, np.uint8))
        assert getattr(pair, of).fetch(keys, memory.rows(n, nbytes), timeout=PATIENCE).all()
        assert np.array_equal(memory.read().reshape(n, nbytes), source)
    assert (_direct(pair, "owner"), _direct(pair)) == (n * nbytes, n * nbytes)


@pytest.mark.parametrize("of", ["owner", "reader"])
def test_memory_of_another_length_is_refused_and_no_neighbour_is_read(
    pair: Pair, allocate: Allocate, destination: DeviceBuffer, of: str
) -> None:
    """Bytes behind a page are another page's, and its word proves nothing of them."""
    _warm(pair, destination)
    keys = pair.publish()
    assert pair.reader.exists(keys).all()
    node = getattr(pair, of)
    memory = allocate(2 * N * NBYTES)
    node.register_memory(memory.array)
    with pytest.raises(UsageError, match=f"{2 * NBYTES}"):
        node.fetch(keys, memory.rows(N, 2 * NBYTES), timeout=PATIENCE)
    assert _direct(pair, of) == 0


@pytest.mark.parametrize("blocks", [0, 4])
@pytest.mark.parametrize("direct", ["1GiB", 0])
def test_small_pieces_come_and_go_by_a_kernel_where_blocks_are_lent(
    kind: str, make_pair: Callable[..., Pair], allocate: Allocate, direct: str | int, blocks: int
) -> None:
    """Pages in pieces of 8 KiB, as layers of an engine's cache are, and one of a length that is no multiple of 16."""
    n_pages, lengths = 24, [8192] * 7 + [8200]
    pair = make_pair(
        transports=["shm"], pool_size="64MiB", device_direct_size=direct, device_kernel_blocks=blocks
    )
    stride = 16384
    nbytes = n_pages * len(lengths) * stride
    memory = allocate(nbytes)
    places = np.empty((n_pages, len(lengths), 2), np.int64)
    places[..., 0] = memory.address + np.arange(n_pages * len(lengths)).reshape(n_pages, -1) * stride
    places[..., 1] = lengths
    pieces = Pieces(places)
    source = np.random.default_rng(6).integers(0, 256, (n_pages, sum(lengths)), np.uint8)
    pair.owner.register_memory(source)
    for node in pair.nodes:
        node.register_memory(memory.array)
    keys = [f"page {i}" for i in range(n_pages)]
    assert pair.owner.publish(keys, source).all()
    before = fake_cuda().counts().kernel_slices if kind == "emulated" else 0
    for round_ in range(2):  # the first read of a peer's pool is staged
        memory.write(np.zeros(nbytes, np.uint8))
        assert pair.reader.fetch(keys, pieces, timeout=PATIENCE).all(), round_
        there = memory.read().reshape(n_pages, len(lengths), stride)
        came = np.concatenate([there[:, i, :length] for i, length in enumerate(lengths)], axis=1)
        assert np.array_equal(came, source)
        assert not there[:, :-1, 8192:].any(), "something was written beside the pieces"
    own = [f"own {key}" for key in keys]
    assert pair.reader.publish(own, pieces, timeout=PATIENCE).all()
    back = np.zeros_like(source)
    pair.owner.register_memory(back)
    assert pair.owner.fetch(own, back, timeout=PATIENCE).all()
    assert np.array_equal(back, source)
    if kind == "emulated":
        assert (fake_cuda().counts().kernel_slices > before) == (blocks > 0)


def test_a_device_that_has_no_use_for_blocks_is_said_and_copies_as_before(
    emulated: FakeCuda, make_pair: Callable[..., Pair], allocate: Allocate, caplog: pytest.LogCaptureFixture
) -> None:
    emulated.fail("cuModuleLoadData", 209)
    pair = make_pair(transports=["shm"], device_kernel_blocks=4)
    memory = allocate(N * NBYTES)
    pair.reader.register_memory(memory.array)
    assert _arrives(pair, pair.publish(), memory)
    assert (
        "copy engines copy small pieces too, though device_kernel_blocks is set: CUDA device 0" in caplog.text
    )
