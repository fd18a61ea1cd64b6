"""How late this machine is: by how much a promise about time may be exceeded without being broken.

    with Lateness() as late:
        node.fetch(...)
    assert late.seconds <= deadline + 0.1 + late.worst

    with returns_within(deadline + 0.1):  # the same
        node.fetch(...)

A busy machine wakes threads late and lets them wait for a processor; p2pkv is not to blame for that, but for all
the rest. Two things are watched, neither of which needs this process's interpreter, so a GIL that is held too long is
no excuse: a small process beside sets timers and notes which of them were late (a machine that stood still), and the
kernel says how long each thread of this process was ready to run and did not (a processor that others had).

Run as a program, this file is that process. It serves all processes that its parent starts, and ends with its parent.
"""

from __future__ import annotations

import atexit
import functools
import mmap
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_TICK = 0.005
"""Each timer's length: what is late for less goes unseen half of the time, and would excuse nothing."""

_NOTED = 0.001
"""A timer that is later than this is noted."""

_PLACES = 4096
"""How many late timers are remembered; at the least 20 s of them."""

_FILE = "LATENESS_OF_TESTS"
"""The environment variable by which processes find the file that the timers' process writes.

Not one of p2pkv's settings, of which one that is unknown is refused.
"""

_N_NOTED, _DUE, _FIRST = 0, 1, 2
"""The file's cells: how many were noted, when the next timer is due, and a ring of pairs (was due, woke)."""


class Lateness:
    """Watches while a block runs. Not for use by several threads at once; make one each."""

    def __init__(self) -> None:
        self._cells = _cells()
        self._began = self._ended = 0.0
        self._waits: dict[str, float] = {}
        self._worst = 0.0

    def __enter__(self) -> Self:
        self._waits = _waits_for_a_processor()
        self._ended = 0.0
        self._began = time.monotonic()
        return self

    def __exit__(self, *exc_info: object) -> None:
        ended = time.monotonic()
        self._worst = self.worst
        self._ended = ended

    @property
    def seconds(self) -> float:
        """How long the block ran, or runs."""
        return (self._ended or time.monotonic()) - self._began

    def __str__(self) -> str:
        return f"late by {self.worst:.3f} s at worst"

    @property
    def worst(self) -> float:
        """The longest that a timer was late and that one thread of this process waited for a processor, added."""
        return self._worst if self._ended else self._late_timers() + self._late_threads()

    def _late_timers(self) -> float:
        now = time.monotonic()
        n = int(self._cells[_N_NOTED])
        late = [now - max(self._cells[_DUE], self._began)]  # the one that has not woken yet
        for i in range(max(0, n - _PLACES), n):
            due, woke = self._cells[_FIRST + 2 * (i % _PLACES) :][:2]
            late.append(min(woke, now) - max(due, self._began))
        return max(0.0, *late)

    def _late_threads(self) -> float:
        waits = _waits_for_a_processor()
        return max((wait - self._waits.get(thread, 0.0) for thread, wait in waits.items()), default=0.0)


@contextmanager
def returns_within(seconds: float) -> Iterator[Lateness]:
    """Demand that a block ends in time, but for the machine's lateness."""
    with Lateness() as late:
        yield late
    assert late.seconds <= seconds + late.worst, (
        f"took {late.seconds:.3f} s instead of {seconds:g} s, and the machine was {late}"
    )


def _waits_for_a_processor() -> dict[str, float]:
    """Return for each thread of this process how long it ever waited, ready to run."""
    waits: dict[str, float] = {}
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return waits  # a process that was made to run out of descriptors
    for thread in threads:
        try:
            _, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        except OSError:
            continue  # ended meanwhile, no descriptor is left, or a kernel without these figures
        waits[thread] = int(waited) / 1e9
    return waits


@functools.cache
def _cells() -> memoryview[float]:
    """Return the cells that the timers' process writes; start it unless a parent of this process has."""
    file = os.environ.get(_FILE, "")
    if not os.path.exists(file):
        file = _start()
    return _mapped(file)


def _start() -> str:
    descriptor, file = tempfile.mkstemp(prefix="p2pkv-lateness-")
    os.truncate(descriptor, 8 * (_FIRST + 2 * _PLACES))
    os.close(descriptor)
    timers = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    atexit.register(_stop, timers)
    assert timers.stdout is not None
    assert timers.stdout.readline()  # it runs
    timers.stdout.close()
    os.environ[_FILE] = file
    return file


def _stop(timers: subprocess.Popen[bytes]) -> None:
    assert timers.stdin is not None
    timers.stdin.close()
    timers.wait()


def _mapped(file: str) -> memoryview[float]:
    with open(file, "r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0)).cast("d")


def _watch(file: str) -> None:
    """Set timers until the parent is gone."""
    cells = _mapped(file)
    cells[_DUE] = time.monotonic() + _TICK
    os.write(1, b"ready\n")
    try:
        while not select.select([0], [], [], _TICK)[0]:
            woke = time.monotonic()
            due = cells[_DUE]
            if woke - due > _NOTED:
                n = int(cells[_N_NOTED])
                place = _FIRST + 2 * (n % _PLACES)
                cells[place], cells[place + 1] = due, woke
                cells[_N_NOTED] = n + 1
            cells[_DUE] = time.monotonic() + _TICK
    finally:
        os.unlink(file)


if __name__ == "__main__":
    _watch(sys.argv[1])
