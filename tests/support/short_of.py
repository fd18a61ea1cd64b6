"""Limits of this process that are lowered for a while: descriptors, address space."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LEVEL_S = 0.3
_MOST_S = 10.0


def _descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


def _address_space() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _wait_for_level(used: Callable[[], object]) -> None:
    """Wait until nothing comes or goes.

    What a start or an end has begun is closed by threads of their own, and a thread that begins reserves 64 MiB more
    for a moment than it keeps.
    """
    gc.collect()
    until = time.monotonic() + _MOST_S
    before, since = used(), time.monotonic()
    while time.monotonic() < min(until, since + _LEVEL_S):
        time.sleep(0.01)
        if (now := used()) != before:
            before, since = now, time.monotonic()


@contextmanager
def descriptors(left: int = 0) -> Iterator[None]:
    """Leave this process ``left`` more descriptors, under a limit that is not far away."""
    _wait_for_level(_descriptors)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, _descriptors()))
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
    _wait_for_level(_address_space)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
