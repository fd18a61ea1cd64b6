"""Tests that fail by chance fail when shaken, and others do not: tests/support/shaken.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"

TESTS = """
import threading

def work():
    return sum(range(3)) == 3

def test_that_asks_before_it_is_done():
    done = threading.Event()
    threading.Timer(0.05, done.set).start()
    assert all(work() for _ in range(50))
    assert not done.is_set()

def test_that_waits_until_it_is_done():
    done = threading.Event()
    threading.Timer(0.05, done.set).start()
    assert all(work() for _ in range(50))
    assert done.wait(60)
"""


def test_what_a_test_asks_too_early_or_too_late_shows(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "-p",
        "shaken",
        "test_it.py",
    ]
    environment = os.environ | {"PYTHONPATH": str(SUPPORT)}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert "FAILED test_it.py::test_that_asks_before_it_is_done" in ended.stdout, ended.stdout + ended.stderr
    assert "PASSED test_it.py::test_that_waits_until_it_is_done" in ended.stdout, ended.stdout + ended.stderr
