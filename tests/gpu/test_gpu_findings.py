"""What ``p2pkv doctor`` says of devices: what they can do was tried out, and what they can't comes with an advice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fake_cuda import FakeCuda, fake_cuda
from p2pkv import _native
from p2pkv.cli.doctor.finding import Finding, Verdict
from p2pkv.cli.doctor.gpu import examine_gpu
from p2pkv.cli.doctor.gpu_sharing import read_in_another_process
from p2pkv.config import Config

_NBYTES = 1 << 20
_FINDINGS = """
import json, sys
from p2pkv.cli.doctor.gpu import examine_gpu
from p2pkv.config import Config

print(json.dumps([f.as_record() for f in examine_gpu(Config.load(json.loads(sys.argv[1]), environ={}))]))
"""


def _findings(**settings: object) -> list[Finding]:
    return list(examine_gpu(Config.load({"device_staging_size": "32MiB", **settings}, environ={})))


def _findings_of_a_process(library: str, fails: str = "") -> dict[str, dict[str, str]]:
    """Ask a process that has no driver yet, whose emulated driver refuses some calls from the beginning on."""
    told = subprocess.run(
        [sys.executable, "-c", _FINDINGS, json.dumps({"cuda_library": library})],
        env=os.environ | {"FAKE_CUDA_FAIL": fails},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    found: list[dict[str, str]] = json.loads(told)
    return {record["what"]: record for record in found}


def test_all_that_a_device_can_do_was_tried_out(cuda_settings: dict[str, object], kind: str) -> None:
    found = _findings(**cuda_settings)
    names = [finding.what for finding in found]
    assert names == ["GPU", "page-locking", "GPU copies", "CUDA IPC", "CUDA IPC", "dmabuf"]
    if kind != "emulated":
        return  # a real one may not be able to
    assert [finding.verdict for finding in found] == [Verdict.GOOD] * len(found), found
    gpu, locking, copies, by_handle, by_descriptor, dmabuf = (finding.says for finding in found)
    assert gpu.startswith("CUDA 12.8 (0: emulated device 0, 1: emulated device 1)")
    assert (
        "come straight out of pools that the node maps, and go straight into its own, of which up to 16 GiB"
        in gpu
    )
    assert gpu.endswith("all others are staged in 32 MiB of page-locked host memory")
    assert locking.startswith("32 MiB were locked for the GPU")
    assert "RLIMIT_MEMLOCK is " in locking
    assert "go many to a launch" in copies
    for what, says in (("cudaMalloc", by_handle), ("cuMemCreate", by_descriptor)):
        assert says.startswith(f"memory of {what}")
        assert "was mapped by another process, which read all 2 MiB of it right" in says
    assert "device memory can be exported" in dmabuf


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"attach": "unix:/run/p2pkv/host"},
            "are staged in 32 MiB of page-locked host memory, over every transport",
        ),
        ({"device_direct_size": 0}, "are staged in 32 MiB of page-locked host memory, over every transport"),
        ({"verify": "checksum"}, "are staged in 32 MiB of page-locked host memory, over every transport"),
        ({"compression": "lossless"}, "come straight out of pools that the node maps, of which up to 16 GiB"),
        (
            {"attach_listen": "unix:/run/p2pkv/host"},
            "come straight out of pools that the node maps, of which",
        ),
    ],
)
def test_the_ways_of_pages_are_those_of_the_settings(
    cuda_settings: dict[str, object], settings: dict[str, object], says: str
) -> None:
    assert f"pages in device memory {says}" in _findings(**cuda_settings, **settings)[0].says


def test_nothing_is_kept_of_what_was_tried(emulated: FakeCuda, cuda_settings: dict[str, object]) -> None:
    _findings(**cuda_settings)
    before = emulated.counts().held
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    _findings(**cuda_settings)
    assert emulated.counts().held == before
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_nothing_is_said_beside_what_is_found(
    cuda_settings: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    _findings(**cuda_settings)
    assert capfd.readouterr().err == ""


def test_an_absent_driver_is_said_to_be() -> None:
    (finding,) = _findings_of_a_process("libcuda-that-is-not-there.so").values()
    assert finding["verdict"] == "note"
    assert "libcuda-that-is-not-there.so can't be loaded" in finding["says"]
    assert "install NVIDIA's driver" in finding["advice"]


def test_without_a_gpu_nothing_is_missing() -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has one")
    (finding,) = _findings_of_a_process("auto").values()
    assert (finding["verdict"], finding["advice"]) == ("good", "")
    assert finding["says"].startswith("no NVIDIA driver here")


def test_a_driver_that_is_too_old_is_said_to_be(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    compiler = os.environ.get("CXX", "c++")
    source = 'extern "C" int cuInit(unsigned) { return 0; }'
    command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    (finding,) = _findings_of_a_process(str(library)).values()
    assert "has no cuDriverGetVersion; a driver of CUDA 11 or newer is needed" in finding["says"]
    assert finding["advice"].startswith("install a newer NVIDIA driver")


@pytest.mark.parametrize(
    ("result", "says", "advice"),
    [
        (100, "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"),
        (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "restart the machine"),
        (999, "CUDA_ERROR_UNKNOWN", "nvidia-smi"),
    ],
)
def test_a_driver_that_does_not_start_comes_with_what_to_do(result: int, says: str, advice: str) -> None:
    (finding,) = _findings_of_a_process(fake_cuda().path, f"cuInit={result}").values()
    assert finding["verdict"] == "note"
    assert f"cuInit: {says}" in finding["says"]
    assert advice in finding["advice"]


@pytest.mark.parametrize(
    ("fails", "what", "says", "advice"),
    [
        (
            "cuDevicePrimaryCtxRetain=2",
            "GPU context",
            "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT",
            "nvidia-smi",
        ),
        ("cuMemHostRegister=2", "page-locking", "cuMemHostRegister of ", "ulimit -l unlimited"),
        ("cuGetProcAddress=500", "GPU copies", "each cost a launch", "CUDA 12.8"),
        ("cuMemcpyBatchAsync=801", "GPU copies", "each cost a launch", "CUDA 12.8"),
        (
            "cuMemGetHandleForAddressRange=801",
            "dmabuf",
            "cuMemGetHandleForAddressRange: CUDA_ERROR_NOT_SUP",
            "open",
        ),
    ],
)
def test_what_a_device_can_not_do_comes_with_what_to_do(
    emulated: FakeCuda, fails: str, what: str, says: str, advice: str
) -> None:
    finding = _findings_of_a_process(emulated.path, fails)[what]
    assert finding["verdict"] == "note"
    assert says in finding["says"]
    assert advice in finding["advice"]


@pytest.mark.parametrize("call", ["cuIpcOpenMemHandle", "cuMemImportFromShareableHandle"])
def test_memory_that_another_process_can_not_map_is_said_not_to_be_shared(
    emulated: FakeCuda, monkeypatch: pytest.MonkeyPatch, cuda_settings: dict[str, object], call: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"{call}=801")  # of the process that maps it, which is to come
    by_kind = [finding for finding in _findings(**cuda_settings) if finding.what == "CUDA IPC"]
    assert len(by_kind) == 2
    bad, good = by_kind if call.startswith("cuIpc") else by_kind[::-1]
    assert good.verdict is Verdict.GOOD
    assert bad.verdict is Verdict.NOTE
    assert f"{call}: CUDA_ERROR_NOT_SUPPORTED" in bad.says
    assert "don't name a transport of device memory in 'transports'" in bad.advice


@pytest.mark.parametrize("by_descriptor", [False, True])
def test_bytes_that_arrive_wrong_in_another_process_are_found(
    emulated: FakeCuda, monkeypatch: pytest.MonkeyPatch, by_descriptor: bool
) -> None:
    """The emulated copies of the other process are made, and bring other bytes."""
    device = _native.CudaDevice.open(0)
    memory = _native.CudaMemory.allocate(device, _NBYTES, by_descriptor)
    read_in_another_process(memory, _NBYTES, 0, emulated.path)
    monkeypatch.setenv("FAKE_CUDA_CORRUPT", "1")
    with pytest.raises(RuntimeError, match="read other bytes than are there"):
        read_in_another_process(memory, _NBYTES, 0, emulated.path)


def test_a_process_that_dies_while_it_maps_is_told_of(
    emulated: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = _native.CudaDevice.open(0)
    memory = _native.CudaMemory.allocate(device, _NBYTES, by_descriptor=False)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the process that was to map it died"):
        read_in_another_process(memory, _NBYTES, 0, emulated.path)
