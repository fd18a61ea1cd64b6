"""What nccl promises beyond the contract of all transports: which library it takes, and what becomes of its errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fake_cuda import fake_cuda
from fake_nccl import fake_nccl, transport
from p2pkv import ConfigError, Outcome, _native, transports
from p2pkv.errors import TransportError
from p2pkv.testing.lateness import returns_within
from p2pkv.testing.transport_fixtures import ENOUGH, Reader, eventually, settled
from p2pkv.testing.transport_peer import N_PAGES, PagedMemory, page_spans, page_words
from p2pkv.transports import nccl
from p2pkv.transports.base import TransportSettings
from p2pkv.transports.nccl import NcclOptions, NcclTransport
from pair import Pair

ALL = list(range(N_PAGES))
WORDS = page_words(ALL, [2] * N_PAGES)


def test_a_stalled_owner_costs_the_deadline_and_its_communicator_soon_after() -> None:
    with transport() as owner, transport() as ours:
        memory, reader = PagedMemory(owner), Reader(ours)
        endpoint, remote = reader.connect(owner.accept, memory.region.describe())
        with fake_nccl().told(held=True, abort_delay_us=500_000):
            transfer = endpoint.read(reader.local, remote, page_spans(ALL), words=WORDS)
            with returns_within(0.2 + 0.1):
                statuses = transfer.wait(0.2)
            reader.bytes[:] = 0x11
            assert set(settled(statuses)) == {"TIMED_OUT"}
            assert eventually(lambda: fake_nccl().counts().communicators == 0, 15.0)
        assert (reader.bytes == 0x11).all(), "written to after wait() returned"
        endpoint, remote = reader.connect(owner.accept, memory.region.describe())
        statuses = endpoint.read(reader.local, remote, page_spans(ALL), words=WORDS).wait(ENOUGH)
        assert set(settled(statuses)) == {"OK"}
    assert fake_nccl().counts().communicators == 0


@pytest.mark.parametrize("what", ["failing_meeting", "failing_operation"])
def test_an_error_that_nccl_tells_later_loses_the_peer_and_no_byte(what: str) -> None:
    with transport() as owner, transport() as ours:
        memory, reader = PagedMemory(owner), Reader(ours)
        meeting, operation = (1, 0) if what == "failing_meeting" else (0, 1)
        # A connection goes to its meeting at once, without waiting for a read.
        with fake_nccl().told(failing_meeting=meeting, failing_operation=operation):
            endpoint, remote = reader.connect(owner.accept, memory.region.describe())
            statuses = endpoint.read(reader.local, remote, page_spans(ALL), words=WORDS).wait(ENOUGH)
        assert set(settled(statuses)) == {"PEER_LOST"}
        assert (reader.bytes == 0xEE).all(), "what nobody vouched for was written"
        endpoint, remote = reader.connect(owner.accept, memory.region.describe())
        statuses = endpoint.read(reader.local, remote, page_spans(ALL), words=WORDS).wait(ENOUGH)
        assert set(settled(statuses)) == {"OK"}


def test_a_slow_network_delays_and_breaks_nothing() -> None:
    with transport() as owner, transport() as ours, fake_nccl().told(delay_us=2000):
        memory, reader = PagedMemory(owner), Reader(ours)
        endpoint, remote = reader.connect(owner.accept, memory.region.describe())
        statuses = endpoint.read(reader.local, remote, page_spans(ALL), words=WORDS).wait(ENOUGH)
        assert set(settled(statuses)) == {"OK"}


def test_endpoints_to_one_owner_share_a_communicator() -> None:
    with transport() as owner, transport() as ours:
        memory, reader = PagedMemory(owner), Reader(ours)
        met = fake_nccl().counts().met
        for _ in range(5):
            endpoint, remote = reader.connect(owner.accept, memory.region.describe())
            statuses = endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)
            assert settled(statuses) == ["OK"]
        assert fake_nccl().counts().met == met + 2, "one communicator, and both of its ranks are here"


def test_memory_that_cuda_can_not_page_lock_is_not_readable() -> None:
    with transport() as owner:
        fake_cuda().fail("cuMemHostRegister", 2)
        with pytest.raises(TransportError, match="cuMemHostRegister"):
            PagedMemory(owner)


def test_page_locked_memory_is_given_back() -> None:
    before = fake_cuda().counts().held
    with transport() as owner, transport() as ours:
        memory, reader = PagedMemory(owner), Reader(ours)
        endpoint, remote = reader.connect(owner.accept, memory.region.describe())
        assert settled(endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)) == [
            "OK"
        ]
        memory.close()
    assert eventually(lambda: fake_cuda().counts().held == before), (before, fake_cuda().counts().held)


def test_nodes_move_pages_over_it(tmp_path: Path) -> None:
    sent = fake_nccl().counts().sent_bytes
    pair = Pair(
        tmp_path,
        transports=["nccl"],
        transport_options={"nccl": {"library": fake_nccl().path}},
        cuda_library=fake_cuda().path,
    )
    try:
        pair.source[:] = np.random.default_rng(1).integers(0, 256, pair.source.shape, np.uint8)
        keys = [f"page {i}" for i in range(len(pair.source))]
        assert (pair.owner.publish(keys, pair.source) == Outcome.HIT).all()
        assert (pair.reader.fetch(keys, pair.destination) == Outcome.HIT).all()
        assert np.array_equal(pair.destination, pair.source)
        assert fake_nccl().counts().sent_bytes >= sent + pair.source.nbytes
    finally:
        pair.close()


def test_auto_never_chooses_it() -> None:
    fake_nccl()  # and so it could be had
    assert "nccl" not in transports.wanted("auto")


def test_asking_for_it_where_it_is_absent_says_what_is_missing() -> None:
    program = (
        "from p2pkv.transports.nccl import NcclTransport as T; print(T.unavailable({'library': 'system'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    if done.stdout.strip() == "None":
        pytest.skip("this machine has NCCL and a GPU")
    assert "libnccl" in done.stdout or "CUDA" in done.stdout
    assert "pip install nvidia-nccl" in done.stdout or "driver" in done.stdout


def test_the_real_library_loads_and_tells_its_version() -> None:
    program = (
        "from p2pkv import _native; from p2pkv.transports import nccl\n"
        "print(nccl.missing_library('auto') or '%s %s' % _native.nccl_library())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    if "no libnccl can be loaded" in done.stdout:
        pytest.skip(f"no NCCL of NVIDIA's here: {done.stdout.strip()}")
    path, version = done.stdout.split()
    assert Path(path).name.startswith("libnccl")
    major, minor, _ = map(int, version.split("."))
    assert (major, minor) >= (2, 17)


def test_the_engines_library_comes_first_then_the_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "wheel_library", lambda: "/wheel/libnccl.so.2")
    monkeypatch.setattr(nccl, "is_loaded", lambda: False)
    assert nccl.libraries() == ["/wheel/libnccl.so.2", "libnccl.so.2"]
    monkeypatch.setattr(nccl, "is_loaded", lambda: True)
    assert nccl.libraries() == ["libnccl.so.2", "/wheel/libnccl.so.2"]
    assert nccl.libraries("wheel") == ["/wheel/libnccl.so.2"]
    assert nccl.libraries("system") == ["libnccl.so.2"]


@pytest.mark.parametrize(
    "options",
    [{"library": "nowhere"}, {"device": -1}, {"channels": 0}, {"channels": 33}, {"communicators": 0}],
)
def test_options_that_can_not_be_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        NcclOptions.parse("nccl", options)


def test_a_device_that_is_not_there_is_said() -> None:
    options = {"library": fake_nccl().path, "device": 7}
    assert "no CUDA device 7" in str(NcclTransport.unavailable(options))


def test_the_doctor_tells_of_the_library() -> None:
    path = fake_nccl().path
    settings = TransportSettings(options={"nccl": {"library": path}})
    (remark,) = NcclTransport.remarks(settings)
    assert path in remark.says
    assert _native.nccl_library()[1] in remark.says


@pytest.mark.parametrize(
    ("version", "allowed", "says"),
    [
        ("2.28.9", "1", "one rank on a GPU"),
        ("2.30.1", "", "NCCL_MULTI_RANK_GPU_ENABLE=1"),
        ("2.30.1", "1", ""),
    ],
)
def test_the_doctor_does_not_try_what_nccl_refuses_one_process(
    monkeypatch: pytest.MonkeyPatch, version: str, allowed: str, says: str
) -> None:
    path = fake_nccl().path
    settings = TransportSettings(options={"nccl": {"library": path}})
    monkeypatch.setattr(_native, "nccl_library", lambda: (path, version))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", allowed)
    why = NcclTransport.untried(settings)
    assert (says in why) if why is not None else not says
