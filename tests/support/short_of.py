"""Limits of this process that are lowered for a while: descriptors, address space."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LEVEL_S = 0.3
_MOST_S = 10.0


def _wait_for_level() -> None:
    """Wait until no descriptor comes or goes: what a start or an end has begun is closed by threads of their own."""
    gc.collect()
    until = time.monotonic() + _MOST_S
    before, since = os.listdir("/proc/self/fd"), time.monotonic()
    while time.monotonic() < min(until, since + _LEVEL_S):
        time.sleep(0.01)
        if (now := os.listdir("/proc/self/fd")) != before:
            before, since = now, time.monotonic()


@contextmanager
def descriptors(left: int = 0) -> Iterator[None]:
    """Leave this process ``left`` more descriptors, under a limit that is not far away."""
    _wait_for_level()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 16, hard))
    taken: list[int] = []
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


@contextmanager
def address_space(left: int) -> Iterator[None]:
    """Leave this process ``left`` bytes of address space."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
