"""Where the device memory of these tests comes from: the emulated driver, or with P2PKV_TEST_GPU a real device.

``P2PKV_TEST_GPU`` is ``cupy`` or ``torch``, or 1 for the first of these that there is.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import eventually
from device_buffers import KINDS, REAL, DeviceBuffer, find_real
from fake_cuda import FakeCuda, fake_cuda
from fake_ibverbs import FakeIbverbs, fake_ibverbs
from gpu.told import pytest_runtest_logreport, pytest_runtest_logstart  # noqa: F401  (pytest finds them here)
from p2pkv import _native
from p2pkv.transports.verbs import VerbsTransport
from pair import Pair
from vllm_on_devices import open_engine  # noqa: F401

_WANTED = os.environ.get("P2PKV_TEST_GPU", "")


@pytest.fixture(scope="session")
def kind() -> str:
    """The kind of device memory of this run."""
    if _WANTED in ("", "0"):
        return "emulated"
    found, reason = find_real([_WANTED] if _WANTED in REAL else REAL)
    if not found:
        pytest.skip(f"no device memory to be had: {reason}")
    return found[0]


_has_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_has_failed] = item.stash.get(_has_failed, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def everything_of_the_driver_is_given_back(kind: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test leaves open changes what a later one counts: devices, streams, events, locked and mapped memory.

    Nothing is asked of a test that has failed: its traceback holds what it had.
    """
    if kind != "emulated":
        yield
        return
    before, n_losses = fake_cuda().counts(), fake_cuda().n_losses
    yield
    if request.node.stash.get(_has_failed, False):
        return
    allowed = replace(before, locked_bytes=1 << 62) if fake_cuda().n_losses > n_losses else before

    def is_given_back() -> bool:
        gc.collect()
        return all(now <= then for now, then in zip(fake_cuda().counts().held, allowed.held, strict=True))

    try:
        eventually(is_given_back, 10.0)
    except AssertionError:
        names = "contexts, streams, events, bytes of locked memory and mappings"
        pytest.fail(f"{names} were {before.held}, and are {fake_cuda().counts().held}")


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
    _native.cuda_use_library(fake.path)  # for tests that go to the driver past any node
    fake.reset()
    yield fake
    fake.reset()


@pytest.fixture
def cards(emulated: FakeCuda) -> Iterator[FakeIbverbs]:
    """The emulated cards, which can be told to refuse and to deceive; everything of theirs is given back."""
    if not _native.HAS_VERBS:
        pytest.skip("p2pkv was built without verbs")
    cards = fake_ibverbs()
    if (reason := VerbsTransport.unavailable({"library": cards.path})) is not None:
        pytest.skip(reason)
    cards.reset()
    before = cards.counts()
    yield cards
    cards.reset()
    after = cards.counts()
    assert (after.regions, after.queue_pairs) == (before.regions, before.queue_pairs)


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
        # none of these tests is about a deadline that it does not name, and a busy machine may stall for seconds
        pairs.append(Pair(tmp_path, **({"deadline": 30.0} | cuda_settings | settings)))  # type: ignore[arg-type]
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()
    pairs.clear()  # pytest keeps `make` for longer, and a pool that a lost device may write to goes with its last user


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return where a host's node may listen for engines."""
    (tmp_path / "host").mkdir(mode=0o700)
    return f"unix:{tmp_path}/host/s"
