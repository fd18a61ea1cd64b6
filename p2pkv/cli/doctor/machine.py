"""What the machine has: libraries, cores, limits, memory."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import zmq

from p2pkv import _native
from p2pkv.cli.doctor.finding import Finding, Verdict, limit, size
from p2pkv.cli.doctor.memory import examine_memory
from p2pkv.config import COMPRESSION, Config
from p2pkv.descriptors import require_descriptors
from p2pkv.errors import ConfigError
from p2pkv.memory import copies

_N_PACKED, _PACKED_NBYTES = 8, 1 << 20
"""Pages that are packed to see how fast that is."""


def examine_machine(config: Config) -> Iterator[Finding]:
    """Look at what every node needs."""
    yield from _versions()
    yield from _cores()
    yield from _memory(config)
    yield _copies(config)
    yield _compression(config)


def _versions() -> Iterator[Finding]:
    yield Finding(Verdict.GOOD, "p2pkv", f"{version('p2pkv')} on Python {platform.python_version()}")
    yield Finding(
        Verdict.GOOD,
        "libraries",
        f"numpy {version('numpy')}, pyzmq {version('pyzmq')}, libzmq {zmq.zmq_version()}",
    )
    if zmq.has("curve"):
        yield Finding(Verdict.GOOD, "CURVE", "libzmq encrypts and authenticates")
    else:
        yield Finding(
            Verdict.BAD, "CURVE", "this libzmq was built without it", "install pyzmq from PyPI's wheels"
        )


def _cores() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0))
    advice = "an engine beside p2pkv's threads wants 2 or more" if usable < 2 else ""
    yield Finding(
        Verdict.GOOD if usable >= 2 else Verdict.NOTE, "cores", f"{usable} of {os.cpu_count()} usable", advice
    )
    yield _descriptors()


def _descriptors() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        require_descriptors()
    except ConfigError as error:
        return Finding(Verdict.BAD, "open files", str(error), "raise it: ulimit -n 65536")
    few = soft != resource.RLIM_INFINITY and soft < 4096
    return Finding(
        Verdict.NOTE if few else Verdict.GOOD,
        "open files",
        limit(soft, ""),
        "raise it (ulimit -n 65536) for clusters of hundreds of nodes" if few else "",
    )


def _memory(config: Config) -> Iterator[Finding]:
    yield examine_memory(config)
    yield _memfd()
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        yield Finding(
            Verdict.GOOD,
            "/dev/shm",
            f"{size(usage.free)} of {size(usage.total)} free; pools are memfds, which it does not limit",
        )
    yield _huge_pages()


def _copies(config: Config) -> Finding:
    try:
        copies.choose(config.copy_kernel, None)
    except ConfigError as error:
        return Finding(Verdict.BAD, "copies", str(error), "leave copy_kernel at auto")
    parts = [
        f"{choice.size_class} {choice.kernel}"
        + (f" ({choice.of_memcpy:.2f} of memcpy)" if choice.of_memcpy else "")
        for choice in copies.choices()
        if choice.operation == "copy"
    ]
    team = copies.hire(config.copy_threads)
    helped = "a second thread joins in" if team is not None and team.is_there else "one thread copies"
    if team is not None:
        team.close()
    summed = ", ".join(dict.fromkeys(c.kernel for c in copies.choices() if c.operation == "copy_and_sum"))
    return Finding(
        Verdict.GOOD,
        "copies",
        f"{', '.join(parts)}; with a checksum {summed}; of 2 MiB and more {helped}; "
        f"this CPU has {', '.join(_native.copy_kernels())}",
    )


def _compression(config: Config) -> Finding:
    if config.compression == "off":
        return Finding(Verdict.GOOD, "compression", "off: pages lie in the pool as they are")
    numbers = np.random.default_rng(1).standard_normal((_N_PACKED, _PACKED_NBYTES // 2), np.float32)
    pages = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)  # bfloat16
    keys = np.arange(_N_PACKED * 16, dtype=np.uint8).reshape(-1, 16)
    pieces = np.array([[[page.ctypes.data, _PACKED_NBYTES]] for page in pages], np.int64)
    pool = _native.Pool(pages.nbytes, packing=COMPRESSION.index("lossless"))
    pool.publish(keys, pieces)
    stats = pool.stats()
    pool.release_memory()
    return Finding(
        Verdict.GOOD,
        "compression",
        f"{config.compression}; random bfloat16 gets {stats['tried_bytes'] / stats['tried_stored_bytes']:.2f} times "
        f"smaller at {stats['tried_bytes'] / max(1, stats['packing_nanoseconds']):.1f} GB/s a thread "
        f"({_native.packing_kernel()}); p2pkv_packing says what a running node does",
    )


def _memfd() -> Finding:
    try:
        _native.SharedRegion.create(os.sysconf("SC_PAGESIZE"))
    except OSError as error:
        return Finding(Verdict.BAD, "memfd", str(error), "let the container use memfd_create and F_ADD_SEALS")
    return Finding(Verdict.GOOD, "memfd", "shared memory can be made and sealed")


def _huge_pages() -> Finding:
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    try:
        chosen = path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return Finding(Verdict.NOTE, "huge pages", "the kernel does not say", "")
    if chosen in ("never", "deny"):
        return Finding(
            Verdict.NOTE,
            "huge pages",
            f"shared memory has none (shmem_enabled is {chosen})",
            f"root may `echo advise > {path}`",
        )
    return Finding(Verdict.GOOD, "huge pages", f"shmem_enabled is {chosen}")
