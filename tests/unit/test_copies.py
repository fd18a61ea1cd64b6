"""The kernel that copies page bytes is measured or named, and says which it is; a second thread joins in, or not."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from p2pkv import _native
from p2pkv.config import Config
from p2pkv.errors import ConfigError
from p2pkv.memory import copies
from p2pkv.node import Node
from p2pkv.page import Outcome

PAGE = 300_000
"""Bytes, of the largest size class and no multiple of anything."""


@pytest.fixture(autouse=True)
def _measured_again():
    yield
    copies.choose(copies.AUTO, None)


@pytest.mark.parametrize("kernel", _native.copy_kernels())
def test_a_node_copies_with_the_kernel_that_is_named(kernel):
    pages = np.random.default_rng(1).integers(0, 256, (3, PAGE), np.uint8)
    rows = np.zeros_like(pages)
    with Node.start(Config(copy_kernel=kernel, pool_size="4MiB", buffer_size=0)) as node:
        with node.register_memory(pages), node.register_memory(rows):
            assert (node.publish(["a", "b", "c"], pages) == Outcome.HIT).all()
            assert (node.fetch(["a", "b", "c"], rows) == Outcome.HIT).all()
        assert np.array_equal(rows, pages)
        shown = [name for name in node.counters() if name.startswith("p2pkv_copy_kernel_info")]
    assert len(shown) == len(copies.choices())
    assert all(f'kernel="{kernel}"' in name for name in shown)


def test_a_kernel_that_this_cpu_lacks_is_refused_and_those_it_has_are_named():
    with pytest.raises(
        ConfigError, match="copy_kernel is 'sse9', which is not for this CPU; it has auto, memcpy"
    ):
        Node.start(Config(copy_kernel="sse9", pool_size="1MiB", buffer_size=0))
    with pytest.raises(ConfigError, match="copy_kernel is 'sse9'"):
        Node.start(Config(copy_kernel="sse9", pool_size=0, buffer_size=0))


def test_what_is_measured_covers_every_operation_and_size_class():
    copies.choose(copies.AUTO, None)
    chosen = copies.choices()
    assert {choice.operation for choice in chosen} == {"copy", "copy_and_sum"}
    assert len({(choice.operation, choice.size_class) for choice in chosen}) == len(chosen) == 6
    assert {choice.kernel for choice in chosen} <= set(_native.copy_kernels())
    assert all(choice.of_memcpy >= 1 for choice in chosen)


def test_nothing_is_measured_over_pages():
    pool = _native.Pool(1 << 20)
    page = np.ones((1, 4096), np.uint8)
    pool.publish(np.zeros((1, 16), np.uint8), np.array([[[page.ctypes.data, 4096]]], np.int64))
    with pytest.raises(ValueError, match="pool has pages"):
        _native.use_fastest_copy_kernels(pool)


def _n_helpers() -> int:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("p2pkv-copies")


def _large_copies(node: Node) -> list[float]:
    counters = node.counters()
    return [counters[f'p2pkv_large_copies_total{{threads="{n}"}}'] for n in (1, 2)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core nobody can help")
def test_all_nodes_of_a_process_have_one_helper_until_the_last_is_closed():
    settings = {"pool_size": "1MiB", "buffer_size": 0}
    with Node.start(Config(**settings)):
        assert _n_helpers() == 1
        with Node.start(Config(**settings)):
            assert _n_helpers() == 1
        assert _n_helpers() == 1
    assert _n_helpers() == 0


@pytest.mark.parametrize("copy_threads", [1, 2])
def test_a_large_batch_is_right_and_counted_whoever_copies_it(copy_threads):
    pages = np.random.default_rng(2).integers(0, 256, (16, PAGE), np.uint8)
    rows = np.zeros_like(pages)
    keys = [f"page-{i}" for i in range(len(pages))]
    with Node.start(Config(copy_threads=copy_threads, pool_size="8MiB", buffer_size=0)) as node:
        assert _n_helpers() <= copy_threads - 1
        before = _large_copies(node)
        with node.register_memory(pages), node.register_memory(rows):
            assert (node.publish(keys, pages) == Outcome.HIT).all()
            for _ in range(4):  # of two the helper has one at least
                rows[:] = 0
                assert (node.fetch(keys, rows) == Outcome.HIT).all()
                assert np.array_equal(rows, pages)
        alone, shared = np.subtract(_large_copies(node), before)
    assert alone + shared == 5
    assert (shared > 0) == (copy_threads == 2 and len(os.sched_getaffinity(0)) > 1)


@pytest.mark.parametrize("copy_threads", [0, 3, -1])
def test_one_thread_copies_or_two(copy_threads):
    with pytest.raises(ConfigError, match=f"copy_threads must be 1 or 2, not {copy_threads}"):
        Config(copy_threads=copy_threads)
