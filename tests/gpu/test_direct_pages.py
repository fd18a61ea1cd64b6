"""Devices copy pages from where they lie in pools of this host, and what they have copied is proven."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from device_buffers import DeviceBuffer
from fake_cuda import FakeCuda
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


def _direct(pair: Pair, of: str = "reader") -> float:
    return getattr(pair, of).counters()["p2pkv_device_direct_bytes_total"]


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
