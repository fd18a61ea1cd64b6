"""A driver that refuses, a device that is lost: a clear error or misses, nothing left behind, nobody hangs."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from device_buffers import DeviceBuffer
from fake_cuda import FakeCuda
from p2pkv import DeviceError
from pair import NBYTES, N, Pair

Allocate = Callable[[int], DeviceBuffer]
OUT_OF_MEMORY = 2
INVALID_VALUE = 1


@pytest.fixture
def pair(emulated: FakeCuda, make_pair: Callable[..., Pair]) -> Pair:
    return make_pair(transports=["shm"], device_staging_size=1 << 16)


@pytest.mark.parametrize("call", ["cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuMemHostRegister"])
def test_a_refusal_at_registration_is_an_error_that_names_it(
    emulated: FakeCuda, pair: Pair, allocate: Allocate, call: str
) -> None:
    memory = allocate(N * NBYTES)
    before = emulated.counts().held
    emulated.fail(call, OUT_OF_MEMORY)
    with pytest.raises(DeviceError, match=f"CUDA device 0: {call}.*CUDA_ERROR_OUT_OF_MEMORY"):
        pair.reader.register_memory(memory.array)
    if call != "cuMemHostRegister":  # then the device is open for the next attempt
        assert emulated.counts().held == before
    keys = pair.publish()
    pair.reader.register_memory(memory.array)
    assert pair.reader.fetch(keys, memory.rows(N, NBYTES)).all()


def test_a_copy_that_fails_costs_misses(
    emulated: FakeCuda, pair: Pair, allocate: Allocate, caplog: pytest.LogCaptureFixture
) -> None:
    memory = allocate(N * NBYTES)
    pair.reader.register_memory(memory.array)
    keys = pair.publish()
    emulated.fail("cuMemcpyHtoDAsync", INVALID_VALUE)
    with caplog.at_level(logging.WARNING):
        assert not pair.reader.fetch(keys, memory.rows(N, NBYTES)).any()
    assert "cuMemcpyHtoDAsync of 32768 bytes: CUDA_ERROR_INVALID_VALUE" in caplog.text
    assert pair.reader.counters()['p2pkv_missed_pages_total{reason="device"}'] == N
    assert pair.reader.fetch(keys, memory.rows(N, NBYTES)).all()
    assert np.array_equal(memory.read().reshape(N, NBYTES), pair.source)


def test_a_copy_that_fails_publishes_nothing(
    emulated: FakeCuda, make_pair: Callable[..., Pair], allocate: Allocate
) -> None:
    pair = make_pair(transports=["shm"], device_direct_size=0)
    memory = allocate(N * NBYTES)
    pair.owner.register_memory(memory.array)
    keys = pair.fresh_keys()
    emulated.fail("cuMemcpyDtoHAsync", INVALID_VALUE)
    assert not pair.owner.publish(keys, memory.rows(N, NBYTES)).any()
    assert not pair.reader.exists(keys).any()
    assert pair.owner.counters()['p2pkv_unpublished_pages_total{reason="device"}'] == N
    assert pair.owner.publish(keys, memory.rows(N, NBYTES)).all()


@pytest.mark.parametrize(
    ("call", "direct", "n_lost"), [("publish", 0, 1 << 16), ("publish", "1GiB", 0), ("fetch", "1GiB", 0)]
)
def test_a_device_lost_in_the_middle_of_a_copy_costs_misses(
    emulated: FakeCuda,
    make_pair: Callable[..., Pair],
    allocate: Allocate,
    caplog: pytest.LogCaptureFixture,
    call: str,
    direct: int | str,
    n_lost: int,
) -> None:
    pair = make_pair(transports=["shm"], device_staging_size=1 << 16, device_direct_size=direct)
    memory = allocate(N * NBYTES)
    pair.owner.register_memory(memory.array)
    keys = pair.fresh_keys() if call == "publish" else pair.publish()
    emulated.hold(copies=True)
    before = emulated.counts()

    def lose() -> None:
        while emulated.counts().queued == before.queued:
            pass
        emulated.lose()

    thread = threading.Thread(target=lose)
    thread.start()
    with caplog.at_level(logging.WARNING):
        assert not getattr(pair.owner, call)(keys, memory.rows(N, NBYTES), timeout=30.0).any()
        thread.join()
        assert not getattr(pair.owner, call)(keys, memory.rows(N, NBYTES), timeout=30.0).any()
    assert len([record for record in caplog.records if "device memory" in record.message]) == 1
    counters = pair.owner.counters()
    # A device might still write there. A fetch was on its way out of the pool, where it reads and no more.
    assert counters["p2pkv_device_staging_lost_bytes"] == n_lost
    host_keys = pair.publish()  # the rest of the node works
    assert pair.fetch_is_right(host_keys)


def test_a_call_returns_only_when_its_copies_have_ended(
    emulated: FakeCuda, pair: Pair, allocate: Allocate
) -> None:
    memory = allocate(N * NBYTES)
    pair.reader.register_memory(memory.array)
    keys = pair.publish()
    emulated.delay_copies(300_000)  # longer than the call may take
    outcomes = pair.reader.fetch(keys, memory.rows(N, NBYTES), timeout=0.25)
    assert emulated.counts().queued == 0
    rows = memory.read().reshape(N, NBYTES)
    assert np.array_equal(rows[outcomes == 1], pair.source[outcomes == 1])


@pytest.mark.parametrize("call", ["publish", "fetch"])
def test_a_call_that_does_not_wait_for_its_copies_has_wrong_bytes(
    emulated: FakeCuda, pair: Pair, allocate: Allocate, call: str
) -> None:
    """The safeguard broken: the driver says that copies are done which have not begun."""
    memory = allocate(N * NBYTES)
    pair.owner.register_memory(memory.array)
    keys = pair.fresh_keys() if call == "publish" else pair.publish()
    there = np.full((N, NBYTES), 1, np.uint8)
    memory.write(there)
    emulated.hold(copies=True)
    emulated.lie_about_events()
    assert getattr(pair.owner, call)(keys, memory.rows(N, NBYTES)).all()
    if call == "publish":
        assert pair.reader.fetch(keys, pair.destination).all()
        assert not np.array_equal(pair.destination, there)
    else:
        assert np.array_equal(memory.read().reshape(N, NBYTES), there)
    emulated.let_go()  # while the memory is still there


def test_copies_leave_the_interpreter_alone(emulated: FakeCuda, pair: Pair, allocate: Allocate) -> None:
    memory = allocate(N * NBYTES)
    pair.reader.register_memory(memory.array)
    keys = pair.publish()
    emulated.hold(copies=True)
    before = emulated.counts()
    thread = threading.Thread(target=lambda: pair.reader.fetch(keys, memory.rows(N, NBYTES), timeout=30.0))
    thread.start()
    while emulated.counts().queued == before.queued:
        pass  # this loop turns, though the copy holds the other thread
    emulated.let_go()
    thread.join()


def test_an_attached_engine_gives_everything_back(
    emulated: FakeCuda, make_pair: Callable[..., Pair], allocate: Allocate
) -> None:
    memory = allocate(N * NBYTES)
    before = emulated.counts().held
    for _ in range(3):
        pair = make_pair(attached=True, transports=["shm"])
        for _ in range(20):
            with pair.owner.register_memory(memory.array):
                keys = pair.fresh_keys()
                assert pair.owner.publish(keys, memory.rows(N, NBYTES)).all()
                assert pair.owner.fetch(keys, memory.rows(N, NBYTES)).all()
        assert pair.owner.counters()["p2pkv_device_staging_used_bytes"] == 0
        pair.close()
        assert emulated.counts().held == before


def test_everything_is_given_back(
    emulated: FakeCuda, make_pair: Callable[..., Pair], allocate: Allocate
) -> None:
    memory = allocate(N * NBYTES)
    before = emulated.counts().held
    pair = make_pair(transports=["shm"])
    keys = pair.publish()
    n_registered = len(pair.reader._parts.registrations.table.memories)
    steady: list[tuple[int, ...]] = []
    for _ in range(200):
        with pair.reader.register_memory(memory.array):
            assert pair.reader.fetch(keys, memory.rows(N, NBYTES)).all()
        steady.append(emulated.counts().held)
    assert steady[-1] == steady[1]  # by the second the owner's pool is mapped, and locked for the device
    assert len(pair.reader._parts.registrations.table.memories) == n_registered
    assert pair.reader.counters()["p2pkv_device_staging_used_bytes"] == 0
    pair.close()
    assert emulated.counts().held == before


def test_nodes_that_come_and_go_leave_nothing(
    emulated: FakeCuda, make_pair: Callable[..., Pair], allocate: Allocate
) -> None:
    memory = allocate(N * NBYTES)
    before = emulated.counts().held
    for _ in range(3):
        pair = make_pair(transports=["tcp"])
        pair.reader.register_memory(memory.array)
        assert pair.reader.fetch(pair.publish(), memory.rows(N, NBYTES)).all()
        pair.close()
        assert emulated.counts().held == before


_WITHOUT_DRIVER = """
import sys
from p2pkv import Config, DeviceError, Node

class Array:
    __cuda_array_interface__ = {"shape": (8,), "typestr": "|u1", "data": (0x7F0000000000, False), "version": 3}

with Node.start(Config.load({"cuda_library": "libcuda-that-is-not-there.so"}, environ={})) as node:
    try:
        node.register_memory(Array())
    except DeviceError as error:
        print(error)
"""


def test_without_a_driver_the_refusal_says_what_is_missing() -> None:
    says = subprocess.run(
        [sys.executable, "-c", _WITHOUT_DRIVER], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert "libcuda-that-is-not-there.so can't be loaded: " in says
    assert "it comes with NVIDIA's driver" in says


def test_an_address_that_no_driver_knows_is_refused(emulated: FakeCuda, pair: Pair) -> None:
    class Liar:
        __cuda_array_interface__ = {  # noqa: RUF012 - the protocol's form
            "shape": (8,),
            "typestr": "|u1",
            "data": (ctypes.addressof(ctypes.c_uint64()), False),
            "version": 3,
        }

    with pytest.raises(
        DeviceError, match=r"the driver \(CUDA 12.8, emulated device 0, .*has no device memory at"
    ):
        pair.reader.register_memory(Liar())
