"""What a test that hangs says before it is ended: where every thread stands, in its process and in those it started.

Loaded as a plugin of pytest. SIGUSR1 makes a process of these tests say it at any time, and SIGABRT while it ends it;
programs of these tests register for the one, and all that run Python inherit PYTHONFAULTHANDLER for the other.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

_GRACE = 60.0
"""How long after its time a test is ended from outside: one that waits in native code does not see the alarm."""

_SAYING = 2.0
"""How long the processes of a test get for saying where they stand; a guess, and it is lost anyway."""


class Hangs:
    """The plugin. ``stderr`` is the real one, which is not lost with a process that is ended."""

    def __init__(self) -> None:
        os.environ["PYTHONFAULTHANDLER"] = "1"
        self._stderr = os.dup(2)
        faulthandler.register(signal.SIGUSR1, file=self._stderr, all_threads=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> Iterator[None]:
        done = yield
        fail = signal.getsignal(signal.SIGALRM)

        def say_and_fail(number: int, frame: FrameType | None) -> None:
            say_where_all_stand()
            if callable(fail):
                fail(number, frame)

        if settings.method == "signal":
            signal.signal(signal.SIGALRM, say_and_fail)
        faulthandler.dump_traceback_later(settings.timeout + _GRACE, exit=True, file=self._stderr)
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> Iterator[None]:
        faulthandler.cancel_dump_traceback_later()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Pytest-xdist ends altogether over a report that is not UTF-8; what tests log need not be."""
        report: Any = yield
        report.sections = [
            (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
        ]
        return report


def say_where_all_stand() -> None:
    """Print the stacks of this process and of all that descend from it; those that can only end with it do."""
    print(f"stacks of process {os.getpid()}", flush=True)
    faulthandler.dump_traceback(file=2, all_threads=True)
    asked = []
    for process in psutil.Process().children(recursive=True):
        number = next((n for n in (signal.SIGUSR1, signal.SIGABRT) if _is_caught(process.pid, n)), None)
        if number is not None:
            asked.append(process.pid)
            os.kill(process.pid, number)
    print(f"stacks of its processes {asked} follow", flush=True)
    time.sleep(_SAYING if asked else 0.0)


def _is_caught(pid: int, number: signal.Signals) -> bool:
    """Return whether the signal would not simply end the process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
