"""How long a pool takes to be made and to be given back, beside the kernel's own way to touch as much shared memory.

And how long one takes to go on with pages that another process has left: looking at all that is known of each of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from p2pkv import _native
from p2pkv.errors import ConfigError
from p2pkv.pool import Pool
from p2pkv_bench.errors import BenchError
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rows import Row, Target, make_row

_NBYTES = 1 << 30
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE``, of Linux 5.14."""
_AT_MOST = 1.2
_HUGE = 2 << 20
_N_LEFT = 1_000_000
_LEFT_GRANULE = 64
"""Bytes; small, so that a million pages of four of them, with all that is known of them, take little memory."""
_LEFT_NBYTES = 4 * _LEFT_GRANULE
_BATCH = 10_000


def rows(_meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Make pools in each way, a reference before each; huge pages only where the machine has set them aside."""
    yield from _made_and_given_back(plan, "a pool of 1 GiB", Target(_AT_MOST, "populate, best", at_most=True))
    yield from _gone_on_with(plan)
    yield from _made_and_given_back(plan, "a pool of 1 GiB, touched behind", None, prefault_behind=True)
    try:
        yield from _made_and_given_back(plan, "a pool of 1 GiB of huge pages", None, huge_page=_HUGE)
    except ConfigError as error:
        plan.tell(f"start: no huge pages: {error}")


def _made_and_given_back(plan: Plan, name: str, target: Target | None, **options: Any) -> Iterator[Row]:
    plan.tell(f"start: {name}")
    made, gone, one, two = [], [], [], []
    for _ in range(plan.rounds):
        one.append(populate_ms(1))
        two.append(populate_ms(2))
        began = time.monotonic()
        pool = Pool(_NBYTES, owner=1, boot=1, **options)
        is_made = time.monotonic()
        pool.close()
        pool.release_memory()
        made.append((is_made - began) * 1e3)
        gone.append((time.monotonic() - is_made) * 1e3)
    best = [min(pair) for pair in zip(one, two, strict=True)]
    yield make_row(
        {"p2pkv": made, "populate, best": best, "populate": one, "populate, 2 threads": two},
        suite="start",
        case=f"{name}: made",
        unit="ms",
        target=target,
    )
    yield make_row({"p2pkv": gone}, suite="start", case=f"{name}: given back", unit="ms")


def _gone_on_with(plan: Plan) -> Iterator[Row]:
    plan.tell(f"start: {_N_LEFT:,} pages gone on with")

    def pool(**left: Any) -> Pool:
        nbytes = _N_LEFT * _LEFT_NBYTES
        return Pool(nbytes, granule=_LEFT_GRANULE, owner=1, boot=1, is_kept=True, **left)

    first = pool()
    fds = os.dup(first.fd), os.dup(first.native.records_fd)
    _publish_all(first)
    first.leave_memory()
    taken = []
    for _ in range(plan.rounds):
        began = time.monotonic()
        successor = pool(left=fds, lock=_native.WriterLock.take(fds[1], 1.0))
        taken.append((time.monotonic() - began) * 1e3)
        if successor.stats()["pages"] != _N_LEFT:
            raise BenchError(f"{successor.stats()['pages']} of {_N_LEFT} pages are there")
        successor.leave_memory()
    for fd in fds:
        os.close(fd)
    yield make_row({"p2pkv": taken}, suite="start", case=f"{_N_LEFT:,} pages gone on with", unit="ms")


def _publish_all(pool: Pool) -> None:
    page = np.zeros(_LEFT_NBYTES, np.uint8)
    pieces = np.tile(np.array([page.ctypes.data, page.nbytes], np.int64), (_BATCH, 1, 1))
    for first in range(0, _N_LEFT, _BATCH):
        keys = np.zeros((_BATCH, 2), np.uint64)
        keys[:, 0] = np.arange(first + 1, first + 1 + _BATCH, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        pool.publish(keys.view(np.uint8), pieces)


def populate_ms(n_threads: int) -> float:
    """Return the milliseconds in which the kernel touches as much memory of a memfd, in so many threads at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.memfd_create("p2pkv-bench")
    errors: list[int] = []
    try:
        os.ftruncate(fd, _NBYTES)
        with mmap.mmap(fd, _NBYTES) as memory:
            address = np.frombuffer(memory, np.uint8).ctypes.data
            part = _NBYTES // n_threads

            def touch(i: int) -> None:
                if libc.madvise(ctypes.c_void_p(address + i * part), ctypes.c_size_t(part), _POPULATE_WRITE):
                    errors.append(ctypes.get_errno())

            threads = [threading.Thread(target=touch, args=(i,)) for i in range(n_threads)]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds = time.monotonic() - began
    finally:
        os.close(fd)
    if errors:
        raise BenchError(f"MADV_POPULATE_WRITE: {os.strerror(errors[0])}; Linux 5.14 or newer is needed")
    return seconds * 1e3
