"""Torch's and CuPy's own memory, streams, threads and failures, on a real device (``torch_cases.py``)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from device_buffers import find_real

_LIMIT_S = 100.0
"""A process imports torch, which takes seconds, makes a context, and closes both."""


@pytest.fixture(autouse=True)
def real_device(kind: str) -> None:
    """These are about what libraries do with a real driver."""
    if kind == "emulated":
        pytest.skip("torch and CuPy have no memory on the emulated driver")
    found, reason = find_real(["torch"])
    if not found:
        pytest.skip(f"torch has no device: {reason}")


def _do(case: str, **environ: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch_cases", case],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | environ,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr.strip()[-1500:]}"


@pytest.mark.parametrize(
    "allocator", ["", "expandable_segments:True", "backend:cudaMallocAsync", "max_split_size_mb:20"]
)
def test_memory_of_every_allocator_of_torch_is_moved_right(allocator: str) -> None:
    _do("memory", PYTORCH_CUDA_ALLOC_CONF=allocator, PYTORCH_ALLOC_CONF=allocator)


def test_memory_of_cupys_asynchronous_pool_is_moved_right() -> None:
    if not find_real(["cupy"])[0]:
        pytest.skip("CuPy is not there")
    _do("cupy_async_memory")


@pytest.mark.parametrize("case", ["streams", "tensors_name_their_streams"])
def test_what_a_stream_still_has_to_do_is_waited_for(case: str) -> None:
    _do(case)


def test_threads_that_never_met_cuda_call_a_node() -> None:
    _do("threads")


def test_a_forked_child_lets_go_and_its_parent_goes_on() -> None:
    _do("fork")


def test_a_kernel_that_fails_costs_the_pages_of_its_device_alone() -> None:
    _do("poisoned")


def test_memory_of_another_context_is_moved_right_or_refused() -> None:
    _do("another_context")


def test_without_a_device_pages_are_in_host_memory_as_ever() -> None:
    _do("no_device", CUDA_VISIBLE_DEVICES="")
