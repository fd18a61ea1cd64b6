"""GPUs that are divided (MIG), hidden or not there: what there is is used, and what does not work says so.

On the emulated driver, which goes by NVIDIA's guide of MIG: a process sees one instance, which CUDA_VISIBLE_DEVICES
names, and CUDA IPC leads to no other GPU instance. Which error a real driver gives there nobody has seen yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster import Cluster, NodeProcess, all_are_fetched, eventually
from fake_cuda import FakeCuda, fake_cuda
from p2pkv.testing.processes import RefusedError

_WHOLE = "GPU-00000000-1111-2222-3333-000000000000"
_MIG = "GPU-00000000-1111-2222-3333-000000000001"
_A, _B, _C = (f"MIG-{digit * 8}-0000-1111-2222-333333333333" for digit in "abc")
_GPUS = f"{_WHOLE};{_MIG}[{_A}+{_B},{_C}]"
"""A whole one, and one of two instances, the first of which is used by two."""
_ROWS: dict[str, Any] = {"n": 16, "nbytes": 16384}
_FINDINGS = """
import json, sys
from p2pkv.cli.doctor.gpu import examine_gpu
from p2pkv.cli.doctor.transports import examine_transports
from p2pkv.config import Config

config = Config.load(json.loads(sys.argv[1]), environ={})
print(json.dumps([f.as_record() for f in [*examine_gpu(config), *examine_transports(config)]]))
"""


def _found(gpus: str, visible: str | None) -> dict[str, dict[str, str]]:
    """Return what the doctor says in a process that has the emulated driver with these GPUs, by what it is about."""
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environ |= {"FAKE_CUDA_GPUS": gpus} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    settings = {"cuda_library": fake_cuda().path, "device_staging_size": "32MiB"}
    told = subprocess.run(
        [sys.executable, "-c", _FINDINGS, json.dumps(settings)],
        env=environ,
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    ).stdout
    found: list[dict[str, str]] = json.loads(told)
    return {record["what"]: record for record in found}


@pytest.mark.parametrize("visible", [None, _A, "1", _MIG])
def test_an_instance_of_a_gpu_is_named_and_what_it_can_not_do_is_said(
    emulated: FakeCuda, visible: str | None
) -> None:
    found = _found(_GPUS, visible)
    assert found["GPU"]["verdict"] == "good"
    assert "(0: emulated device 0 MIG 1g.10gb)" in found["GPU"]["says"]
    assert found["CUDA IPC"]["verdict"] == "good", "within the instance"
    mig = found["MIG"]
    assert mig["verdict"] == "note"
    assert f"{_A} is an instance of a GPU" in mig["says"]
    assert "CUDA IPC leads to no other instance" in mig["says"]
    assert "rows for those go through host memory" in mig["says"]
    assert "NVIDIA does not support NCCL" in mig["says"]


@pytest.mark.parametrize("visible", ["0", _WHOLE])
def test_a_whole_gpu_beside_it_is_as_any(emulated: FakeCuda, visible: str) -> None:
    found = _found(_GPUS, visible)
    assert "(0: emulated device 0);" in found["GPU"]["says"]
    assert "MIG" not in found


@pytest.mark.parametrize(
    ("gpus", "visible"),
    [(_GPUS, ""), (_GPUS, "7"), (_GPUS, "MIG-of-before"), (f"{_MIG}[]", None), (f"{_MIG}[]", "0")],
)
def test_no_device_is_said_with_what_hides_it(emulated: FakeCuda, gpus: str, visible: str | None) -> None:
    found = _found(gpus, visible)
    gpu = found["GPU"]
    assert gpu["verdict"] == "note"
    assert "cuInit: CUDA_ERROR_NO_DEVICE" in gpu["says"]
    assert gpu["advice"].startswith("see CUDA_VISIBLE_DEVICES")
    assert "nvidia-smi -L lists" in gpu["advice"]
    assert "until then no device memory can be registered" in gpu["advice"]
    if visible is not None:
        assert f"CUDA_VISIBLE_DEVICES is {visible!r}" in gpu["says"]
    assert "no CUDA driver can be used: cuInit: CUDA_ERROR_NO_DEVICE" in found["transport cuda_ipc"]["says"]
    assert "right" in found["transport shm"]["says"], "host memory is none of its business"


def test_a_driver_that_can_not_tell_uuids_goes_by_the_name(
    emulated: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuDeviceGetUuid_v2=801")
    found = _found(_GPUS, _A)
    assert "device 0 is an instance of a GPU" in found["MIG"]["says"]


Start = Callable[..., NodeProcess]


@pytest.fixture
def start(emulated: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts nodes in processes of their own, each of which sees what it is told of the GPUs."""
    monkeypatch.setenv("FAKE_CUDA_GPUS", _GPUS)
    with Cluster(transports=["cuda_ipc", "tcp"], buffer_size=0, cuda_library=emulated.path) as cluster:

        def start(node_id: str, visible: str, **options: Any) -> NodeProcess:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            return cluster.start(node_id, readable=True, in_memfd=True, **options)

        start.cluster = cluster  # type: ignore[attr-defined]
        yield start


def _went_directly(start: Start, device: str, theirs: tuple[str, str]) -> float:
    """Hand rows over between processes that see these; return how many bytes went from device to device."""
    nodes = [start(f"node {i}", visible, device=device) for i, visible in enumerate(theirs)]
    start.cluster.meet(*nodes)  # type: ignore[attr-defined]
    producer, consumer = nodes
    for seed in range(1, 6):
        consumer.call("grant", request=f"{seed}", timeout=30.0, **_ROWS)
        producer.call("offer", request=f"{seed}", seed=seed, to=consumer.node_id, **_ROWS)
        got = consumer.call("wait", request=f"{seed}", timeout=30.0, seed=seed, nbytes=_ROWS["nbytes"])
        assert (got["statuses"], got["wrong"]) == (["OK"], 0)
    return float(consumer.call("counters")["p2pkv_direct_bytes_total"])


@pytest.mark.parametrize("device", ["emulated", "emulated_virtual"])
@pytest.mark.parametrize("theirs", [(_A, _A), (_A, _B)])
def test_rows_go_directly_within_a_gpu_instance(start: Start, device: str, theirs: tuple[str, str]) -> None:
    assert _went_directly(start, device, theirs) > 0


@pytest.mark.parametrize("device", ["emulated", "emulated_virtual"])
@pytest.mark.parametrize("theirs", [(_A, _C), (_A, _WHOLE)])
def test_rows_for_another_gpu_instance_go_through_host_memory(
    start: Start, device: str, theirs: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert _went_directly(start, device, theirs) == 0
    consumer = start.cluster.nodes[1]  # type: ignore[attr-defined]
    counters = consumer.call("counters")
    assert counters["p2pkv_staged_to_device_bytes_total"] == 5 * _ROWS["n"] * _ROWS["nbytes"]
    assert counters["p2pkv_transfer_fallbacks_total"] > 0

    said = ""

    def is_said() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "device memory of peer node 0 is not reached over cuda_ipc" in said

    eventually(is_said, 10.0)
    assert said.count("is not reached over cuda_ipc") == 1
    assert "CUDA_ERROR_NOT_SUPPORTED" in said
    assert "rows go through host memory" in said


def test_a_node_without_a_device_has_its_pages_of_host_memory(start: Start) -> None:
    nodes = [start("without", "", transports=["shm", "tcp"]), start("with", _A, transports=["shm", "tcp"])]
    start.cluster.meet(*nodes)  # type: ignore[attr-defined]
    keys = [f"page {i}" for i in range(16)]
    assert all(nodes[0].call("publish", keys=keys, nbytes=16384))
    all_are_fetched(nodes[1], keys, 16384)


def test_a_node_without_a_device_says_why_it_has_no_cuda_ipc(start: Start) -> None:
    with pytest.raises(RefusedError, match=r"cuda_ipc.*cuInit: CUDA_ERROR_NO_DEVICE"):
        start("without", "")
