"""Engines that publish device memory through their host's node: it pulls what has been copied, and nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import pages
from cluster import Cluster, eventually
from device_buffers import DeviceBuffer, EmulatedBuffer
from fake_cuda import FakeCuda
from p2pkv import Config, DeviceError, Node, Pieces, UsageError, _native
from p2pkv.attach.cache import AttachedCache
from p2pkv.attach.device_publishing import DevicePublishing
from p2pkv.cache.call import PageCall
from p2pkv.cache.device_rounds import DevicePages, Store
from p2pkv.cache.staging_room import Round
from p2pkv.memory.registrations import Registrations
from p2pkv.memory.staging import DeviceMemory
from pair import NBYTES, N, Pair
from threads import in_a_thread

Allocate = Callable[[int], DeviceBuffer]
PATIENCE = 30.0
INVALID_VALUE = 1
ROUND = 16
"""Pages of a round: a call has half of a staging of four granules, and a round half of that."""
STAGING = 4 * ROUND * NBYTES


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair(attached=True, transports=["shm"], device_staging_size=STAGING)


@pytest.fixture
def source(pair: Pair, allocate: Allocate) -> DeviceBuffer:
    memory = allocate(4 * ROUND * NBYTES)
    pair.owner.register_memory(memory.array)
    return memory


def test_the_staging_is_mapped_by_the_node_and_copied_out_of_once(pair: Pair, source: DeviceBuffer) -> None:
    before = pair.host.counters()["p2pkv_attached_memory_bytes"]
    keys = [f"many {i}" for i in range(4 * ROUND)]
    source.write(pages.filled(keys, NBYTES))
    assert pair.owner.publish(keys, source.rows(len(keys), NBYTES)).all()
    mapped = pair.host.counters()["p2pkv_attached_memory_bytes"]
    assert mapped == before == STAGING  # and no staging of a line
    counters = pair.owner.counters()
    assert counters['p2pkv_staged_bytes_total{direction="to_host"}'] == len(keys) * NBYTES
    assert counters["p2pkv_published_pages_total"] == len(keys)
    assert counters["p2pkv_published_bytes_total"] == len(keys) * NBYTES
    assert counters["p2pkv_device_staging_used_bytes"] == 0
    assert pages.are_fetched(pair.reader, keys, NBYTES, PATIENCE)
    assert pages.are_fetched(pair.owner, keys, NBYTES, PATIENCE)


def test_pages_of_another_host_arrive(make_pair: Callable[..., Pair], allocate: Allocate) -> None:
    for transport in ("shm", "tcp"):
        pair = make_pair(attached=True, transports=[transport], device_staging_size=STAGING)
        memory = allocate(2 * ROUND * NBYTES)
        pair.owner.register_memory(memory.array)
        keys = [f"{transport} {i}" for i in range(2 * ROUND)]
        rows = pages.filled(keys, NBYTES)
        with pair.reader.register_memory(rows):
            assert pair.reader.publish(keys, rows).all()
        assert pair.owner.fetch(keys, memory.rows(len(keys), NBYTES), timeout=PATIENCE).all()
        assert np.array_equal(memory.read().reshape(-1, NBYTES), rows)
        counters = pair.owner.counters()
        assert counters['p2pkv_staged_bytes_total{direction="to_device"}'] == len(keys) * NBYTES
        assert counters[f'p2pkv_fetched_bytes_total{{source="{transport}"}}'] == len(keys) * NBYTES
        pair.close()


def test_the_driver_that_a_setting_names_is_used(
    cluster: Cluster, path: str, kind: str, cuda_settings: dict[str, object]
) -> None:
    cluster.start("host", attach_listen=path)
    engine = cluster.start("engine", attach=path, device=kind, device_staging_size=STAGING, **cuda_settings)
    assert engine.call("counters")["p2pkv_device_staging_bytes"] == STAGING


def test_what_is_there_of_a_batch_is_published_without_its_bytes(pair: Pair, source: DeviceBuffer) -> None:
    keys = pair.publish()
    mixed = [key for pair_of in zip(keys, pair.fresh_keys(), strict=True) for key in pair_of]
    rows = pages.filled(mixed, NBYTES)
    rows[::2] = 0  # other bytes: they must not count
    source.write(rows)
    assert pair.owner.publish(mixed, source.rows(len(mixed), NBYTES)).all()
    assert pair.owner.counters()['p2pkv_staged_bytes_total{direction="to_host"}'] == N * NBYTES
    assert pages.are_fetched(pair.reader, mixed, NBYTES, PATIENCE)


def test_a_page_of_another_length_is_refused_before_anything_is_stored(
    pair: Pair, source: DeviceBuffer
) -> None:
    keys = [*pair.publish()[:1], "new"]
    with pytest.raises(UsageError, match=r"page 0 was published with 4096 bytes, .* has 8192"):
        pair.owner.publish(keys, source.rows(2, 2 * NBYTES))
    assert not pair.owner.exists(["new"]).any()


class Interrupted:
    """Copies as :class:`DevicePages`, with something done when the first round is stored."""

    def __init__(self, pages_: DevicePages, act: Callable[[], None]) -> None:
        self._pages, self._act = pages_, act

    def lift(self, call: PageCall, rows: NDArray[np.intp], store: Store, deadline: float) -> None:
        def store_and_act(round_: Round) -> bool:
            goes_on = store(round_)
            self._act()
            self._act = lambda: None
            return goes_on

        self._pages.lift(call, rows, store_and_act, deadline)


def test_what_was_stored_before_a_later_round_is_refused_is_found_by_others(
    make_pair: Callable[..., Pair], allocate: Allocate
) -> None:
    pair = make_pair(attached=True, transports=["shm"], device_staging_size=STAGING, replicas=1)
    memory = allocate(4 * ROUND * NBYTES)
    pair.owner.register_memory(memory.array)
    keys = [f"page {i}" for i in range(4 * ROUND)]
    memory.write(pages.filled(keys, NBYTES))
    other = np.zeros((1, 2 * NBYTES), np.uint8)
    pair.host.register_memory(other)

    def publish_longer() -> None:
        assert pair.host.publish(keys[:1], other, timeout=PATIENCE).all()

    cache = pair.owner._cache
    assert isinstance(cache, AttachedCache)
    before = cache._from_devices
    cache._from_devices = DevicePublishing(
        Interrupted(before._pages, publish_longer),  # type: ignore[arg-type]
        cache._reader.locations,
    )
    with pytest.raises(UsageError, match=r"page 0 was published with 8192 bytes, .* has 4096"):
        pair.owner.publish(keys, memory.rows(len(keys), NBYTES), timeout=PATIENCE)
    eventually(lambda: pair.reader.exists(keys[-ROUND:], timeout=PATIENCE).all(), 10.0)


def test_a_page_that_is_published_once_in_several_rounds_counts_as_used_once(
    tmp_path: Path, path: str, allocate: Allocate, cuda_settings: dict[str, object]
) -> None:
    settings = {"disk_path": str(tmp_path / "disk"), "disk_size": "64MiB", "disk_admission": "second_use"}
    host = Node.start(Config.load({"node_id": "host", "attach_listen": path, **settings}, environ={}))
    engine = Config.load({"attach": path, "device_staging_size": STAGING, **cuda_settings}, environ={})
    with host, Node.start(engine) as node:
        memory = allocate(3 * ROUND * NBYTES)
        node.register_memory(memory.array)
        keys = [f"page {i}" for i in range(3 * ROUND)]
        memory.write(pages.filled(keys, NBYTES))
        tier = host._parts.caching.tier

        def n_on_disk(keys: list[str]) -> int:
            assert tier.flush(PATIENCE)
            return int(tier.contains(node._cache.hash(keys)[1]).sum())

        old, new = keys[: 2 * ROUND], keys[2 * ROUND :]
        assert node.publish(old, memory.rows(len(old), NBYTES), timeout=PATIENCE).all()
        assert n_on_disk(keys) == 0
        assert node.publish(keys, memory.rows(len(keys), NBYTES), timeout=PATIENCE).all()
        assert (n_on_disk(old), n_on_disk(new)) == (len(old), 0)


def test_a_page_that_the_pool_can_not_take_is_refused(
    make_pair: Callable[..., Pair], allocate: Allocate
) -> None:
    pair = make_pair(attached=True, transports=["shm"])
    memory = allocate(2 << 20)
    pair.owner.register_memory(memory.array)
    with pytest.raises(UsageError, match="does not fit the pool of the host's node"):
        pair.owner.publish(["large"], memory.rows(1, 2 << 20))


def test_a_page_may_lie_on_several_devices(emulated: FakeCuda, pair: Pair) -> None:
    keys, half = pair.fresh_keys(), NBYTES // 2
    rows = pages.filled(keys, NBYTES)
    buffers = [EmulatedBuffer(N * half, device) for device in (0, 1)]
    for i, buffer in enumerate(buffers):
        buffer.write(np.ascontiguousarray(rows[:, i * half : (i + 1) * half]))
        pair.owner.register_memory(buffer.array)
    starts = np.stack([buffer.address + half * np.arange(N) for buffer in buffers], axis=1)
    pieces = Pieces(np.stack([starts, np.full_like(starts, half)], axis=2).astype(np.int64))
    assert pair.owner.publish(keys, pieces, stream=0).all()
    assert pages.are_fetched(pair.reader, keys, NBYTES, PATIENCE)
    for buffer in buffers:
        buffer.close()


def test_nobody_sees_a_page_before_it_is_copied(emulated: FakeCuda, pair: Pair, source: DeviceBuffer) -> None:
    keys = pair.fresh_keys()
    source.write(pages.filled(keys, NBYTES))
    before = emulated.counts().queued
    emulated.hold(copies=True)
    thread, outcomes = in_a_thread(lambda: pair.owner.publish(keys, source.rows(N, NBYTES), timeout=PATIENCE))
    eventually(lambda: emulated.counts().queued > before, PATIENCE)
    for node in pair.nodes:
        assert not node.exists(keys).any()
    emulated.let_go()
    thread.join(PATIENCE)
    assert outcomes[0].all()
    assert pages.are_fetched(pair.reader, keys, NBYTES, PATIENCE)


def test_a_call_that_does_not_wait_for_its_copies_has_wrong_bytes(
    emulated: FakeCuda, pair: Pair, source: DeviceBuffer
) -> None:
    """The safeguard broken: the driver says that copies are done which have not begun."""
    keys = pair.fresh_keys()
    rows = np.full((N, NBYTES), 1, np.uint8)
    source.write(rows)
    emulated.hold(copies=True)
    emulated.lie_about_events()
    assert pair.owner.publish(keys, source.rows(N, NBYTES)).all()
    assert pair.reader.fetch(keys, pair.destination).all()
    assert not np.array_equal(pair.destination, rows)
    emulated.let_go()  # while the memory is still there


def test_a_publish_returns_only_when_its_copies_have_ended(
    emulated: FakeCuda, pair: Pair, source: DeviceBuffer
) -> None:
    keys = pair.fresh_keys()
    source.write(pages.filled(keys, NBYTES))
    emulated.delay_copies(300_000)  # longer than the call may take
    outcomes = pair.owner.publish(keys, source.rows(N, NBYTES), timeout=0.25)
    assert emulated.counts().queued == 0
    assert not outcomes.any()
    assert not pair.owner.exists(keys).any()
    counters = pair.owner.counters()
    assert counters['p2pkv_unpublished_pages_total{reason="device"}'] == N
    assert counters["p2pkv_device_staging_used_bytes"] == 0


def test_a_copy_that_fails_publishes_nothing(emulated: FakeCuda, pair: Pair, source: DeviceBuffer) -> None:
    keys = pair.fresh_keys()
    source.write(pages.filled(keys, NBYTES))
    emulated.fail("cuMemcpyDtoHAsync", INVALID_VALUE)
    assert not pair.owner.publish(keys, source.rows(N, NBYTES)).any()
    assert not pair.reader.exists(keys).any()
    assert pair.owner.counters()['p2pkv_unpublished_pages_total{reason="device"}'] == N
    assert pair.owner.publish(keys, source.rows(N, NBYTES)).all()
    assert pages.are_fetched(pair.reader, keys, NBYTES, PATIENCE)


def test_a_device_that_is_lost_in_the_middle_costs_misses(
    emulated: FakeCuda, pair: Pair, source: DeviceBuffer
) -> None:
    keys = [f"lost {i}" for i in range(2 * ROUND)]
    emulated.hold(copies=True)
    before = emulated.counts().queued
    thread, outcomes = in_a_thread(
        lambda: pair.owner.publish(keys, source.rows(len(keys), NBYTES), timeout=PATIENCE)
    )
    eventually(lambda: emulated.counts().queued > before, PATIENCE)
    emulated.lose()
    thread.join(PATIENCE)
    assert not outcomes[0].any()
    assert not pair.owner.publish(keys, source.rows(len(keys), NBYTES), timeout=PATIENCE).any()
    assert not pair.reader.exists(keys).any()
    counters = pair.owner.counters()
    assert counters["p2pkv_device_staging_lost_bytes"] == STAGING // 2  # a device might still write there
    assert counters['p2pkv_unpublished_pages_total{reason="device"}'] == 2 * len(keys)
    assert pair.fetch_is_right(pair.publish())  # the rest of the engine works


def test_memory_that_can_not_be_locked_is_refused_in_words(
    emulated: FakeCuda, make_pair: Callable[..., Pair], allocate: Allocate
) -> None:
    pair = make_pair(attached=True, transports=["shm"], device_staging_size=STAGING)
    memory = allocate(N * NBYTES)
    emulated.fail("cuMemHostRegister", INVALID_VALUE)
    with pytest.raises(DeviceError, match=r"CUDA device 0: cuMemHostRegister.*CUDA_ERROR_INVALID_VALUE"):
        pair.owner.register_memory(memory.array)
    assert pair.host.counters()["p2pkv_attached_memory_bytes"] == 0
    keys = pair.fresh_keys()
    memory.write(pages.filled(keys, NBYTES))
    pair.owner.register_memory(memory.array)
    assert pair.owner.publish(keys, memory.rows(N, NBYTES)).all()
    assert pages.are_fetched(pair.reader, keys, NBYTES, PATIENCE)


def test_metrics_go_on_while_the_node_is_told_of_the_staging(emulated: FakeCuda) -> None:
    is_told, may_go_on = threading.Event(), threading.Event()
    forgotten: list[int] = []

    def show(address: int, nbytes: int, fd: int) -> Callable[[], None]:
        is_told.set()
        assert may_go_on.wait(PATIENCE)
        return lambda: forgotten.append(address)

    registrations = Registrations([])
    devices = DeviceMemory(registrations, STAGING, show=show)
    thread, results = in_a_thread(lambda: devices.use(0))
    assert is_told.wait(PATIENCE)
    reading, readings = in_a_thread(devices.readings)
    reading.join(PATIENCE / 2)
    told = list(readings)
    closing_, _ = in_a_thread(devices.close)  # as a signal's handler may
    closing_.join(PATIENCE / 2)
    may_go_on.set()
    for each in (thread, reading, closing_):
        each.join(PATIENCE)
    assert [reading["p2pkv_device_staging_bytes"] for reading in told] == [STAGING]
    assert len(results) == len(forgotten) == 1
    registrations.close()


def test_staging_that_the_node_does_not_map_is_copied_twice(
    make_pair: Callable[..., Pair], allocate: Allocate, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair(attached=True, transports=["shm"], device_staging_size=STAGING)
    own_host = pair.owner._parts.own_host  # type: ignore[union-attr]
    for i in range(1024):  # as many as a node maps of one engine
        region = _native.SharedRegion.create(4096)
        assert own_host.attachment.share(4096, region.fd, PATIENCE) == (i + 1, "")
    memory = allocate(N * NBYTES)
    with caplog.at_level(logging.WARNING):
        pair.owner.register_memory(memory.array)
    assert "is copied twice when its pages are published" in caplog.text
    own_host.attachment.forget(1)  # there is room for the memory of a line
    keys = pair.fresh_keys()
    memory.write(pages.filled(keys, NBYTES))
    assert pair.owner.publish(keys, memory.rows(N, NBYTES)).all()
    assert pages.are_fetched(pair.reader, keys, NBYTES, PATIENCE)
