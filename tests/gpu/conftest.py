"""Where the device memory of these tests comes from: the emulated driver, or with P2PKV_TEST_GPU a real device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from device_buffers import KINDS, DeviceBuffer, find_real
from fake_cuda import FakeCuda, fake_cuda
from pair import Pair

_WANTS_REAL = os.environ.get("P2PKV_TEST_GPU", "") not in ("", "0")


@pytest.fixture(scope="session")
def kind() -> str:
    """The kind of device memory of this run."""
    if not _WANTS_REAL:
        return "emulated"
    found, reason = find_real()
    if not found:
        pytest.skip(f"no device memory to be had: {reason}")
    return found


@pytest.fixture
def cuda_settings(kind: str) -> dict[str, object]:
    """What a node's configuration needs beside."""
    return {"cuda_library": fake_cuda().path} if kind == "emulated" else {}


@pytest.fixture
def emulated(kind: str) -> Iterator[FakeCuda]:
    """The emulated driver, which can be told to fail; it works again when the test ends."""
    if kind != "emulated":
        pytest.skip("a real driver can't be told to fail")
    fake = fake_cuda()
    fake.reset()
    yield fake
    fake.reset()


@pytest.fixture
def allocate(kind: str) -> Iterator[Callable[[int], DeviceBuffer]]:
    """Makes device memory that goes with the test."""
    made: list[DeviceBuffer] = []

    def allocate(nbytes: int) -> DeviceBuffer:
        made.append(KINDS[kind](nbytes))
        return made[-1]

    yield allocate
    for buffer in made:
        buffer.close()


@pytest.fixture
def make_pair(tmp_path: Path, cuda_settings: dict[str, object]) -> Iterator[Callable[..., Pair]]:
    """Makes two nodes that know each other; they are closed when the test ends."""
    pairs: list[Pair] = []

    def make(**settings: object) -> Pair:
        pairs.append(Pair(tmp_path, **(cuda_settings | settings)))  # type: ignore[arg-type]
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()
