"""The HiCache backend without SGLang: whole nodes in this process, pools of every layout SGLang has."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from hicache_backends import PAGES, FailingNode, Open, failed, storage_config
from host_pools import MHA, MLA, HostPoolFake, TensorFake
from p2pkv import Node
from p2pkv.integrations.sglang import stats
from p2pkv.integrations.sglang_hicache import P2PKVHiCache
from p2pkv.testing.lateness import returns_within

POOLS = [("mha", layout) for layout in MHA] + [("mla", layout) for layout in MLA] + [("mixed", "page_first")]


@pytest.mark.parametrize("attached", [False, True], ids=["", "attached"])
@pytest.mark.parametrize(("kind", "layout"), POOLS)
def test_pages_of_every_layout_arrive_byte_for_byte(
    open_backend: Open, kind: str, layout: str, *, attached: bool
) -> None:
    ours, theirs = HostPoolFake(layout, kind=kind), HostPoolFake(layout, kind=kind, n_pages=24)
    writer, reader = open_backend(ours), open_backend(theirs)
    sources, targets = [3, 1, 15, 0, 7, 6, 9, 2], [20, 2, 4, 23, 0, 11, 7, 5]
    for seed, page in enumerate(sources):
        ours.fill(page, seed)
    assert writer.batch_set_v1(PAGES, ours.indices(*sources)) == [True] * 8
    assert writer.node.counters()["p2pkv_published_pages_total"] == 8  # one entry a page, whatever its pieces
    assert reader.batch_exists(PAGES) == 8
    assert reader.batch_get_v1(PAGES, theirs.indices(*targets)) == [True] * 8
    assert [theirs.content(page) for page in targets] == [ours.content(page) for page in sources]
    untouched = set(range(24)) - set(targets)
    assert not any(any(theirs.content(page)) for page in untouched)


@pytest.mark.parametrize("attached", [False, True], ids=["", "attached"])
@pytest.mark.parametrize(("kind", "layout"), [pool for pool in POOLS if pool[0] != "mixed"])
def test_both_interfaces_find_the_same_pages(
    open_backend: Open, kind: str, layout: str, *, attached: bool
) -> None:
    ours, theirs = HostPoolFake(layout, kind=kind), HostPoolFake(layout, kind=kind)
    flat, zero_copy = open_backend(ours), open_backend(theirs)
    for page in range(8):
        ours.fill(page, page)
    assert flat.batch_set(PAGES[:4], [ours.flat_page(page) for page in range(4)])
    assert flat.set(PAGES[4], ours.flat_page(4))
    assert zero_copy.batch_get_v1(PAGES[:5], theirs.indices(0, 1, 2, 3, 4)) == [True] * 5
    assert [theirs.content(page) for page in range(5)] == [ours.content(page) for page in range(5)]

    theirs.fill(5, 5)
    assert zero_copy.batch_set_v1([PAGES[5]], theirs.indices(5)) == [True]
    targets = [np.zeros_like(ours.flat_page(0)) for _ in range(3)]
    got = flat.batch_get([PAGES[5], PAGES[6], PAGES[0]], targets)
    assert [tensor is target for tensor, target in zip(got, targets, strict=True)] == [True, False, True]
    assert got[1] is None
    assert (targets[0] == theirs.flat_page(5)).all()
    assert not targets[1].any(), "a miss leaves the flat tensor alone"
    assert (targets[2] == ours.flat_page(0)).all()
    assert flat.get(PAGES[7], targets[1]) is None


def test_flat_batches_larger_than_the_staging_buffer_arrive(open_backend: Open) -> None:
    writer = open_backend(settings={"pool_size": "64MiB"})
    reader = open_backend()
    values = [np.full(1 << 20, i, np.uint8) for i in range(20)]
    keys = [f"{i:064x}" for i in range(20)]
    assert writer.batch_set(keys, values)
    targets = [np.zeros(1 << 20, np.uint8) for _ in keys]
    assert all(got is target for got, target in zip(reader.batch_get(keys, targets), targets, strict=True))
    assert all((target == value).all() for target, value in zip(targets, values, strict=True))


def test_only_the_prefix_without_a_gap_counts(open_backend: Open) -> None:
    pool = HostPoolFake(n_pages=1)
    writer, reader = open_backend(pool, {"pool_size": "1MiB"}), open_backend(HostPoolFake())
    keys = [f"{i:064x}" for i in range(64)]
    for i, key in enumerate(keys):  # the first three stay in use, those after them are evicted
        pool.fill(0, i)
        assert writer.batch_set_v1([key], pool.indices(0)) == [True]
        writer.batch_get_v1(keys[: min(i + 1, 3)], pool.indices(*[0] * min(i + 1, 3)))
    eventually(lambda: reader.batch_exists(keys) == 3, 10.0)  # evictions reach the directory a little later
    assert reader.batch_exists(keys[-8:]) == 8
    assert reader.batch_exists(keys[10:11] + keys[-8:]) == 0


def test_a_page_that_was_set_can_be_fetched_and_one_that_was_not_can_not(open_backend: Open) -> None:
    ours, theirs = HostPoolFake(n_pages=64), HostPoolFake(n_pages=64)
    writer, reader = open_backend(ours, {"pool_size": "1MiB"}), open_backend(theirs)
    keys = [f"{i:064x}" for i in range(64)]
    for page in range(64):
        ours.fill(page, page)
    stored = writer.batch_set_v1(keys, ours.indices(*range(64)))
    assert 0 < sum(stored) < 64, "the pool holds some of the batch"
    assert reader.batch_get_v1(keys, theirs.indices(*range(64))) == stored
    assert all(theirs.content(page) == ours.content(page) for page in range(64) if stored[page])


def test_a_wrong_length_is_a_miss_and_counted(open_backend: Open) -> None:
    pool = HostPoolFake()
    backend = open_backend(pool)
    right, short = pool.flat_page(0), np.zeros(10, np.uint8)
    assert not backend.set(PAGES[0], short)
    assert not backend.batch_set(PAGES[:2], [right, short])
    assert backend.batch_get(PAGES[:2], [right, short])[1] is None
    assert backend.batch_get(PAGES[:1], [right])[0] is right, "the others of the batch are not harmed"
    assert backend.batch_set_v1(PAGES[:2], pool.indices(0)) == [False, False]
    assert backend.batch_get_v1(PAGES[:2], pool.indices(0, 1, 2)) == [False, False]
    assert failed(backend, "set", "UsageError") == 3
    assert failed(backend, "get", "UsageError") == 2
    assert backend.batch_exists(PAGES) == 1


def test_a_wrong_length_without_a_pool_is_a_miss_and_counted(open_backend: Open) -> None:
    writer, reader = open_backend(), open_backend()
    assert writer.set("page", np.ones(4096, np.uint8))
    assert reader.exists("page")
    assert reader.get("page", np.zeros(2048, np.uint8)) is None
    assert failed(reader, "get", "UsageError") == 1


def test_memory_that_is_no_tensor_is_a_miss_and_counted(open_backend: Open) -> None:
    backend = open_backend()
    assert not backend.set("page", None)
    assert not backend.set("page", np.zeros((8, 8))[:, ::2])
    assert backend.get("page") is None
    assert backend.batch_get(["page"]) == [None]
    assert failed(backend, "set", "UsageError") == 2
    assert failed(backend, "get", "UsageError") == 2


def test_any_memory_will_do_for_a_flat_page(open_backend: Open) -> None:
    backend = open_backend()
    filled = (ctypes.c_uint8 * 4096)(*[7] * 4096)
    assert backend.set("page", filled)
    for target in (TensorFake(np.zeros(1024, np.float32)), bytearray(4096), (ctypes.c_uint8 * 4096)()):
        assert backend.get("page", target) is target
        assert bytes(getattr(target, "array", target)) == b"\x07" * 4096


def test_a_closed_backend_misses(open_backend: Open) -> None:
    pool = HostPoolFake()
    backend = open_backend(pool)
    assert backend.batch_set_v1(PAGES, pool.indices(*range(8))) == [True] * 8
    with returns_within(10.0):
        backend.close()
        backend.close()
    assert backend.batch_exists(PAGES) == 0
    assert backend.batch_get_v1(PAGES, pool.indices(*range(8))) == [False] * 8
    assert backend.batch_set_v1(PAGES, pool.indices(*range(8))) == [False] * 8
    assert backend.get(PAGES[0], pool.flat_page(0)) is None
    assert not backend.batch_set(PAGES[:1], [pool.flat_page(0)])
    assert not backend.clear()
    assert failed(backend, "exists", "ClosedError") == 1


def test_an_empty_batch_is_no_failure(open_backend: Open) -> None:
    pool = HostPoolFake()
    backend = open_backend(pool)
    assert backend.batch_exists([]) == 0
    assert backend.batch_get_v1([], np.arange(0)) == []
    assert backend.batch_set_v1([], np.arange(0)) == []
    assert backend.batch_get([], []) == []
    assert backend.batch_set([], [])
    assert not [name for name in backend.node.counters() if name.startswith("p2pkv_failed_calls")]


def test_no_exception_reaches_sglang_and_each_cause_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = P2PKVHiCache(storage_config(), start_node=FailingNode)
    pool = HostPoolFake()
    backend.register_mem_pool_host(pool)
    for _ in range(3):
        assert backend.batch_exists(PAGES) == 0
        assert backend.batch_get_v1(PAGES, pool.indices(*range(8))) == [False] * 8
        assert backend.batch_set_v1(PAGES, pool.indices(*range(8))) == [False] * 8
        assert backend.batch_get(PAGES[:1], [pool.flat_page(0)]) == [None]
        assert not backend.batch_set(PAGES[:1], [pool.flat_page(0)])
        assert not backend.clear()
        transfer = SimpleNamespace(name="kv", keys=PAGES[:1], host_indices=None, hit_policy="all_pages")
        assert backend.batch_exists_v2(PAGES, [transfer]).kv_hit_pages == 0
        assert backend.batch_get_v2([transfer]) == {"kv": [False]}
    assert failed(backend, "exists", "ZeroDivisionError") == 6
    assert failed(backend, "get", "ZeroDivisionError") == 6
    said = [
        r.message for r in caplog.records if r.levelno == logging.WARNING and "ZeroDivisionError" in r.message
    ]
    assert len(said) == len(set(said))
    for operation in ("exists", "get", "set", "clear"):
        assert any(f": {operation} failed" in message for message in said)


def test_a_prefix_is_looked_up_in_one_round(open_backend: Open) -> None:
    pool = HostPoolFake()
    asked: list[int] = []

    class CountingNode(Node):
        def exists(self, keys: Any, *, leading: bool = False, timeout: float | None = None) -> Any:
            assert leading  # what comes after a gap counts for nothing
            asked.append(len(keys))
            return super().exists(keys, leading=leading, timeout=timeout)

    backend = P2PKVHiCache(storage_config(), {}, start_node=CountingNode.start)
    try:
        backend.register_mem_pool_host(pool)
        assert backend.batch_exists([f"{i:064x}" for i in range(2000)]) == 0
        assert asked == [2000]
    finally:
        backend.close()


def test_three_threads_at_once_never_see_a_wrong_byte(open_backend: Open) -> None:
    ours, theirs = HostPoolFake(n_pages=32), HostPoolFake(n_pages=8)
    writer, reader = open_backend(ours, {"pool_size": "1MiB"}), open_backend(theirs)
    n_batches, errors, hits = 60, [], [0]
    done = threading.Event()

    def keys_of(batch: int) -> list[str]:
        return [f"{batch * 8 + i:064x}" for i in range(8)]

    def write() -> None:
        for batch in range(n_batches):
            pages = range(batch % 4 * 8, batch % 4 * 8 + 8)
            for i, page in enumerate(pages):
                ours.fill(page, batch * 8 + i)
            if writer.batch_set_v1(keys_of(batch), ours.indices(*pages)) != [True] * 8:
                errors.append(f"batch {batch} was not stored")
        done.set()

    def look() -> None:
        while not done.is_set():
            for batch in range(n_batches):
                n_found = reader.batch_exists(keys_of(batch))
                if not 0 <= n_found <= 8:
                    errors.append(f"{n_found} of 8 pages")

    def read() -> None:
        right = HostPoolFake(n_pages=1)
        batch = 0
        while not done.is_set() or batch % n_batches:
            keys = keys_of(batch % n_batches)
            got = reader.batch_get_v1(keys, theirs.indices(*range(8)))
            for page in np.flatnonzero(got).tolist():
                right.fill(0, batch % n_batches * 8 + page)
                if theirs.content(page) != right.content(0):
                    errors.append(f"page {page} of batch {batch} is wrong")
            hits[0] += sum(got)
            batch += 1

    threads = [threading.Thread(target=work) for work in (write, look, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert hits[0] > 0, "nothing was ever found: nothing was tested"


def test_indices_of_sglang_are_not_kept(open_backend: Open) -> None:
    class Indices(np.ndarray):
        pass

    pool = HostPoolFake()
    backend = open_backend(pool)
    indices = pool.indices(*range(8)).view(Indices)
    alive = weakref.ref(indices)
    assert backend.batch_set_v1(PAGES, indices) == [True] * 8
    assert backend.batch_get_v1(PAGES, indices) == [True] * 8
    del indices
    assert alive() is None


def test_clear_takes_back_what_this_rank_published(open_backend: Open) -> None:
    pool = HostPoolFake()
    writer, reader = open_backend(pool), open_backend(HostPoolFake())
    assert writer.batch_set_v1(PAGES, pool.indices(*range(8))) == [True] * 8
    assert reader.batch_exists(PAGES) == 8
    assert writer.clear()
    assert reader.batch_get_v1(PAGES, pool.indices(*range(8))) == [False] * 8
    assert writer.batch_exists(PAGES) == 0


def test_stats_are_what_happened_since_the_last_time(open_backend: Open) -> None:
    pool = HostPoolFake()
    backend = open_backend(pool, enable_storage_metrics=True)
    backend.batch_set_v1(PAGES, pool.indices(*range(8)))
    backend.batch_get_v1(PAGES[:3], pool.indices(0, 1, 2))
    backend.batch_get_v1(["nowhere"], pool.indices(0))
    stats = backend.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([3], [8])
    assert len(stats.prefetch_bandwidth) == len(stats.backup_bandwidth) == 1
    assert stats.prefetch_bandwidth[0] > 0
    stats.prefetch_stats = object()  # as SGLang does
    assert backend.get_stats().prefetch_pgs == []


@pytest.mark.parametrize("attached", [True])
def test_an_attached_server_says_that_its_pages_are_not_its_own_to_clear(
    open_backend: Open, caplog: pytest.LogCaptureFixture, *, attached: bool
) -> None:
    pool = HostPoolFake()
    with caplog.at_level(logging.INFO):
        backend = open_backend(pool)
    assert "clear will clear nothing" in caplog.text, "at start, before anybody asks for it"
    caplog.clear()
    assert backend.batch_set_v1(PAGES[:2], pool.indices(0, 1)) == [True] * 2
    assert backend.clear() is False
    assert "p2pkv namespace bump" in caplog.text
    assert backend.batch_exists(PAGES[:2]) == 2


def test_what_sglang_is_told_of_traffic_is_of_its_own_class(
    open_backend: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scheduler asserts that, and ends over any other class."""

    @dataclass
    class StorageMetrics:
        prefetch_pgs: list[int]
        backup_pgs: list[int]
        prefetch_bandwidth: list[float]
        backup_bandwidth: list[float]

    offered = SimpleNamespace(StorageMetrics=StorageMetrics)
    monkeypatch.setitem(sys.modules, "sglang.srt.observability.metrics_collector", offered)  # type: ignore[arg-type]
    stats._kind.cache_clear()
    pool = HostPoolFake()
    backend = open_backend(pool, enable_storage_metrics=True)
    assert backend.batch_set_v1(PAGES[:2], pool.indices(0, 1)) == [True] * 2
    told = backend.get_stats()
    stats._kind.cache_clear()
    assert isinstance(told, StorageMetrics)
    assert (told.prefetch_pgs, told.backup_pgs) == ([], [2])
