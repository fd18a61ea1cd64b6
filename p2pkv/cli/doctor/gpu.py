"""What this machine can do with the memory of its GPUs, and what would have to be changed for the rest.

Whatever can be tried out is: memory is locked, shared with another process and read there, exported. A machine without
an NVIDIA driver is told so in one line.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from p2pkv import _native
from p2pkv.cli.doctor.finding import Finding, Verdict, limit
from p2pkv.cli.doctor.gpu_sharing import read_in_another_process
from p2pkv.config import Config
from p2pkv.errors import ConfigError
from p2pkv.memory.staging import use_library as use_cuda_library

_KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
_MODULES = Path("/proc/modules")
_DEVICE = 0
"""The device that things are tried out with: those of a machine are alike, and each costs a second."""
_TRIED_NBYTES = 2 << 20
_PIECE = 4096
_KINDS = (("memory of cudaMalloc", False), ("memory of cuMemCreate (expandable_segments)", True))
_ADVICE = {
    "can't be loaded": "install NVIDIA's driver, and give the container its GPUs (--gpus all)",
    "has no cu": "install a newer NVIDIA driver",
    "NO_DEVICE": "see CUDA_VISIBLE_DEVICES, and give the container its GPUs (--gpus all); of a GPU in MIG mode only "
    "its instances count, which nvidia-smi -L lists",
    "STUB_LIBRARY": "take the toolkit's folder of stubs out of LD_LIBRARY_PATH",
    "DEVICE_UNAVAILABLE": "another process has the GPU for itself: nvidia-smi -c DEFAULT",
    "SYSTEM_NOT_READY": "start nvidia-fabricmanager, which machines with NVSwitches need",
    "SYSTEM_DRIVER_MISMATCH": "libcuda and the kernel's driver differ: load the module anew, or restart the machine",
    "COMPAT_NOT_SUPPORTED": "take the folder of cuda-compat out of LD_LIBRARY_PATH",
}
"""What to do about a driver that can't be used, by a part of what it says."""
_OTHERWISE = "see that nvidia-smi works here, and that /dev/nvidia-uvm is there (nvidia-modprobe -u -c 0)"


def examine_gpu(config: Config) -> Iterator[Finding]:
    """Say which CUDA devices there are, and what can be done with their memory; that takes a second or two."""
    found, has_devices = _find_driver(config)
    yield found
    if not has_devices:
        return
    try:
        device = _native.CudaDevice.open(_DEVICE)
    except RuntimeError as error:
        yield Finding(Verdict.NOTE, "GPU context", str(error), _advice_on(str(error)))
        return
    yield from _instances()
    yield _page_locking(device, config)
    yield _copies(device)
    for what, by_descriptor in _KINDS:
        yield _sharing(device, config, what, by_descriptor=by_descriptor)
    yield _dmabuf(device)


def _find_driver(config: Config) -> tuple[Finding, bool]:
    """Look for the driver; say too whether it has a device."""
    try:
        use_cuda_library(config.cuda_library)
        version, devices = _native.cuda_driver()
    except (ConfigError, RuntimeError) as error:
        if config.cuda_library == "auto" and not _KERNEL_DRIVER.exists():
            says = "no NVIDIA driver here; pages move between host memories"
            return Finding(Verdict.GOOD, "GPU", says), False
        advice = f"{_advice_on(str(error))}; until then no device memory can be registered"
        return Finding(Verdict.NOTE, "GPU", f"{error}{_hidden()}", advice), False
    says = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if not devices:
        return Finding(Verdict.NOTE, "GPU", f"{says} (no device){_hidden()}", _ADVICE["NO_DEVICE"]), False
    names = ", ".join(f"{i}: {name}" for i, name in enumerate(devices))
    return Finding(Verdict.GOOD, "GPU", f"{says} ({names}); {_ways_of_pages(config)}"), True


def _hidden() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"


def _instances() -> Iterator[Finding]:
    """Say what a GPU that is divided can't do, by NVIDIA's guide of MIG."""
    for instance in filter(None, _native.cuda_mig_instances()):
        says = (
            f"{instance} is an instance of a GPU: CUDA IPC leads to no other instance, so that rows for those go "
            "through host memory; NVIDIA does not support NCCL there"
        )
        yield Finding(
            Verdict.NOTE,
            "MIG",
            says,
            "name the transport by CUDA IPC for processes of one instance, and not NCCL's",
        )


def _ways_of_pages(config: Config) -> str:
    """Say how pages come to devices and from there, by the settings."""
    staging = f"{config.device_staging_nbytes / 2**20:g} MiB of page-locked host memory"
    if not config.device_direct_nbytes or config.verify == "checksum" or config.attach:
        return f"pages in device memory are staged in {staging}, over every transport"
    # nor into a pool that others look into, or go on with, or whose pages are packed
    is_given = not (config.attach_listen or config.keeper) and config.compression == "off"
    into = ", and go straight into its own" if is_given else ""
    return (
        f"pages in device memory come straight out of pools that the node maps{into}, of which up to "
        f"{config.device_direct_nbytes / 2**30:g} GiB are locked for that (device_direct_size); all others are staged "
        f"in {staging}"
    )


def _advice_on(error: str) -> str:
    return next((advice for part, advice in _ADVICE.items() if part in error), _OTHERWISE)


def _page_locking(device: _native.CudaDevice, config: Config) -> Finding:
    """Lock as much as a node does when device memory is registered first."""
    nbytes = config.device_staging_nbytes
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    bound = f"RLIMIT_MEMLOCK is {limit(soft, ' bytes')}"
    try:
        _native.CudaStaging.create(device, nbytes)
    except RuntimeError as error:
        advice = "raise it (ulimit -l unlimited, docker --ulimit memlock=-1), or lower device_staging_size"
        return Finding(Verdict.NOTE, "page-locking", f"{error}; {bound}", advice)
    says = f"{nbytes / 2**20:g} MiB were locked for the GPU, as device_staging_size says; {bound}"
    return Finding(Verdict.GOOD, "page-locking", says)


def _copies(device: _native.CudaDevice) -> Finding:
    """Copy two pieces that don't lie in a row, and see whether that took one launch."""
    what = "GPU copies"
    try:
        memory = _native.CudaMemory.allocate(device, 4 * _PIECE, by_descriptor=False)
        staging = _native.CudaStaging.create(device, 4 * _PIECE)
        starts = np.array([[0], [2 * _PIECE]], np.int64)
        there, here = (
            np.stack([at + starts, np.full_like(starts, _PIECE)], axis=2)
            for at in (memory.address, staging.address)
        )
        here[:, 0, 0] = here[::-1, 0, 0]
        copies = _native.cuda_begin_copies([device], np.zeros((2, 1), np.int32), there, here, None, True)
        copied, error = copies.wait()
        if copied != 0:
            raise RuntimeError(error)
    except RuntimeError as error:
        return Finding(Verdict.NOTE, what, str(error), _advice_on(str(error)))
    if device.gathers_copies:
        return Finding(
            Verdict.GOOD, what, "pieces that don't lie in a row go many to a launch (cuMemcpyBatchAsync)"
        )
    says = "pieces that don't lie in a row each cost a launch, which is slow where they are small"
    return Finding(Verdict.NOTE, what, says, "drivers of CUDA 12.8 and newer (570) gather them")


def _sharing(device: _native.CudaDevice, config: Config, what: str, *, by_descriptor: bool) -> Finding:
    """Have another process map memory of this one, and compare what it reads."""
    name = "CUDA IPC"
    try:
        memory = _native.CudaMemory.allocate(device, _TRIED_NBYTES, by_descriptor)
        read_in_another_process(memory, _TRIED_NBYTES, _DEVICE, config.cuda_library)
    except RuntimeError as error:
        advice = "don't name a transport of device memory in 'transports': rows go through host memory then"
        return Finding(Verdict.NOTE, name, f"{what}: {error}", advice)
    says = f"{what} was mapped by another process, which read all {_TRIED_NBYTES >> 20} MiB of it right"
    return Finding(Verdict.GOOD, name, says)


def _dmabuf(device: _native.CudaDevice) -> Finding:
    """Have the driver export memory as network cards take it, and look for the older way beside it."""
    modules = _MODULES.read_text() if _MODULES.exists() else ""
    is_loaded = re.search(r"^nvidia_peermem ", modules, re.MULTILINE) is not None
    peer = f"nvidia_peermem is {'loaded' if is_loaded else 'not loaded'}"
    try:
        _native.CudaMemory.allocate(device, _TRIED_NBYTES, by_descriptor=False).export_dmabuf()
    except RuntimeError as error:
        advice = "the open kernel modules of NVIDIA's driver, and Linux 5.12, export it"
        return Finding(Verdict.NOTE, "dmabuf", f"{error}; {peer}", advice)
    return Finding(Verdict.GOOD, "dmabuf", f"device memory can be exported; {peer}")
