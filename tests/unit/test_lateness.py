"""What tests measure beside a promise about time excuses a machine that is late, and nothing else."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from cluster import eventually
from p2pkv.testing import lateness
from p2pkv.testing.lateness import Lateness

SLACK = 0.1
"""What the helper may be wrong by."""


@pytest.fixture
def one_busy_processor() -> Iterator[None]:
    """Leave this thread one processor, on which a program spins."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    spins = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spins], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        yield
        program.kill()
    os.sched_setaffinity(0, before)


def test_time_that_others_had_the_processor_is_excused(one_busy_processor: None) -> None:
    with Lateness() as late:
        began = time.thread_time()
        while time.thread_time() - began < 0.2:
            pass
    assert late.worst > 0.05
    assert late.seconds <= 0.2 + late.worst + SLACK


def test_a_machine_that_stood_still_is_excused() -> None:
    with Lateness() as late:
        file = os.environ["LATENESS_OF_TESTS"]
        (timers,) = (p.pid for p in psutil.process_iter(["cmdline"]) if file in (p.info["cmdline"] or []))
        os.kill(timers, signal.SIGSTOP)
        try:
            eventually(lambda: late.worst > 0.3, 10.0)
        finally:
            os.kill(timers, signal.SIGCONT)
        eventually(lambda: late._cells[lateness._N_NOTED] > 0, 10.0)
    assert late.worst > 0.3
    with Lateness() as later:
        pass
    assert later.worst < 0.3


def test_sleep_and_a_held_interpreter_are_no_excuse() -> None:
    def unexcused() -> bool:
        with Lateness() as late:
            time.sleep(0.2)
            ctypes.PyDLL(None).usleep(200_000)
        return late.seconds >= 0.4 and late.worst < 0.1

    eventually(unexcused, 60.0)  # a busy machine has its excuses now and then
