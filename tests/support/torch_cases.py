"""Cases of torch's memory on a real device: ``python -m torch_cases NAME`` does one of them.

A process of its own does it, and ends with status 0 if all was well. Torch chooses where memory comes from when it is
imported, an error of a kernel ends a context for good, and a fork is no thing to try among other tests.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_buffers import DeviceRows
from p2pkv.errors import UsageError
from pair import Pair

N, NBYTES = 32, 256 << 10
PATIENCE = 30.0


def _rows(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (N, NBYTES), np.uint8)


def _there_and_back(pair: Pair, torch: Any, seed: int) -> None:
    """Publish rows of a device, fetch them into other memory of it, and compare."""
    expected = _rows(seed)
    source = torch.from_numpy(expected.copy()).cuda()
    destination = torch.zeros_like(source)
    torch.cuda.synchronize()
    keys = [f"{seed}-{i}" for i in range(N)]
    with pair.owner.register_memory(source), pair.reader.register_memory(destination):
        assert pair.owner.publish(keys, source, timeout=PATIENCE).all()
        assert pair.reader.fetch(keys, destination, timeout=PATIENCE).all()
        assert np.array_equal(destination.cpu().numpy(), expected)


def memory(pair: Pair) -> None:
    """Memory of whatever allocator torch was told to have, in segments that have grown and in new ones."""
    torch = importlib.import_module("torch")
    kept = []
    for seed in range(4):
        kept.append(torch.ones(3 << 20, dtype=torch.uint8, device="cuda"))  # what comes next lies behind it
        _there_and_back(pair, torch, seed)
    del kept
    torch.cuda.empty_cache()
    _there_and_back(pair, torch, 5)


def streams(pair: Pair) -> None:
    """A call waits for what a stream still has to do: one of torch's own, the legacy default one, the thread's."""
    torch = importlib.import_module("torch")
    source = torch.zeros((N, NBYTES), dtype=torch.uint8, device="cuda")
    destination = torch.zeros_like(source)
    pair.owner.register_memory(source)
    pair.reader.register_memory(destination)
    own = torch.cuda.Stream()
    per_thread = torch.cuda.ExternalStream(2)
    for value, (stream, handle) in enumerate(
        [(own, int(own.cuda_stream)), (torch.cuda.default_stream(), 1), (per_thread, 2)], start=1
    ):
        keys = [f"{value}-{i}" for i in range(N)]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # cycles, some 0.1 s
            source.fill_(value)
        assert pair.owner.publish(keys, source, stream=handle, timeout=PATIENCE).all()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            destination.fill_(255)  # would write over what came
        assert pair.reader.fetch(keys, destination, stream=handle, timeout=PATIENCE).all()
        torch.cuda.synchronize()
        assert torch.equal(destination, torch.full_like(destination, value)), f"stream {handle}"


def tensors_name_their_streams(pair: Pair) -> None:
    """A call without ``stream`` waits for the stream that is torch's current one, which DLPack orders."""
    torch = importlib.import_module("torch")
    source = torch.zeros((N, NBYTES), dtype=torch.uint8, device="cuda")
    pair.owner.register_memory(source)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        source.fill_(3)
        keys = [f"named {i}" for i in range(N)]
        assert pair.owner.publish(keys, source, timeout=PATIENCE).all()
    found = np.zeros((N, NBYTES), np.uint8)
    pair.reader.register_memory(found)
    assert pair.reader.fetch(keys, found, timeout=PATIENCE).all()
    assert np.unique(found).tolist() == [3]


def threads(pair: Pair) -> None:
    """Threads that CUDA has never heard of call a node, all at once."""
    torch = importlib.import_module("torch")

    def call(seed: int) -> None:
        for i in range(3):
            _there_and_back(pair, torch, 100 * seed + i)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(call, range(1, 7)))


def fork(pair: Pair) -> None:
    """A child of a process with a node in CUDA lets go of everything, and its parent goes on."""
    torch = importlib.import_module("torch")
    _there_and_back(pair, torch, 1)
    child = os.fork()
    if child == 0:
        pair.close()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    _there_and_back(pair, torch, 2)


def poisoned(pair: Pair) -> None:
    """A kernel that failed ends the context: pages for the device are missed and counted, those for the host come."""
    torch = importlib.import_module("torch")
    expected = _rows(1)
    pair.owner.register_memory(expected)
    keys = [f"poisoned {i}" for i in range(N)]
    assert pair.owner.publish(keys, expected).all()
    destination = torch.zeros((N, NBYTES), dtype=torch.uint8, device="cuda")
    pair.reader.register_memory(destination)
    assert pair.reader.fetch(keys, destination, timeout=PATIENCE).all()
    torch._assert_async(torch.zeros(1, device="cuda"))
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("the context ended:", str(error).splitlines()[0])
    else:
        raise AssertionError("the kernel did not fail")
    for _ in range(3):
        assert not pair.reader.fetch(keys, destination, timeout=5.0).any()
    counters = pair.reader.counters()
    print({name: value for name, value in counters.items() if "missed" in name and value})
    assert counters['p2pkv_missed_pages_total{reason="device"}'] == 3 * N
    found = np.zeros((N, NBYTES), np.uint8)
    pair.reader.register_memory(found)
    assert pair.reader.fetch(keys, found).all()
    assert np.array_equal(found, expected)


def another_context(pair: Pair) -> None:
    """Memory of a context that is not the device's primary one is moved right, or refused in words."""
    torch = importlib.import_module("torch")
    torch.zeros(1, device="cuda")
    cuda = ctypes.CDLL("libcuda.so.1")
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(N * NBYTES)) == 0
    assert cuda.cuMemsetD8_v2(address, ctypes.c_ubyte(77), ctypes.c_size_t(N * NBYTES)) == 0
    assert cuda.cuCtxSynchronize() == 0

    rows = DeviceRows(address.value, (N, NBYTES))
    keys = [f"context {i}" for i in range(N)]
    try:
        pair.owner.register_memory(rows)
    except UsageError as error:
        print("refused:", error)
        return
    assert pair.owner.publish(keys, rows, timeout=PATIENCE).all()
    found = np.zeros((N, NBYTES), np.uint8)
    pair.reader.register_memory(found)
    assert pair.reader.fetch(keys, found).all()
    assert np.unique(found).tolist() == [77]
    print("moved right")


def cupy_async_memory(pair: Pair) -> None:
    """Memory of CuPy's pool of cudaMallocAsync."""
    cupy = importlib.import_module("cupy")
    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    expected = _rows(1)
    source = cupy.asarray(expected)
    destination = cupy.zeros_like(source)
    keys = [f"async {i}" for i in range(N)]
    pair.owner.register_memory(source)
    pair.reader.register_memory(destination)
    assert pair.owner.publish(keys, source, timeout=PATIENCE).all()
    assert pair.reader.fetch(keys, destination, timeout=PATIENCE).all()
    assert np.array_equal(destination.get(), expected)


def no_device(pair: Pair) -> None:
    """A process that is shown no device has its pages in host memory as ever."""
    assert not importlib.import_module("torch").cuda.is_available()
    expected = _rows(1)
    found = np.zeros_like(expected)
    keys = [f"host {i}" for i in range(N)]
    pair.owner.register_memory(expected)
    pair.reader.register_memory(found)
    assert pair.owner.publish(keys, expected).all()
    assert pair.reader.fetch(keys, found).all()
    assert np.array_equal(found, expected)


CASES: dict[str, Callable[[Pair], None]] = {
    case.__name__: case
    for case in (
        memory,
        streams,
        tensors_name_their_streams,
        threads,
        fork,
        poisoned,
        another_context,
        cupy_async_memory,
        no_device,
    )
}


def main() -> None:
    """Do one case."""
    with tempfile.TemporaryDirectory(prefix="p2pkv-torch-") as folder:
        pair = Pair(Path(folder), transports=["shm"], pool_size=8 * N * NBYTES, deadline=PATIENCE)
        try:
            CASES[sys.argv[1]](pair)
        finally:
            pair.close()


if __name__ == "__main__":
    main()
