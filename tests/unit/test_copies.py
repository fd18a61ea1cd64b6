"""The kernel that copies page bytes is measured or named, and says which it is."""

from __future__ import annotations

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
