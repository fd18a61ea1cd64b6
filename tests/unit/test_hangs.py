"""A test that hangs says where it and the processes that it started stand, in the interpreter or in native code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
CONFTEST = """
import hangs
from hangs import Hangs

hangs._GRACE = 3.0

def pytest_configure(config):
    config.pluginmanager.register(Hangs())
"""
CHILD = """
import time

def child_waits():
    print("waits", flush=True)
    time.sleep(1000)

child_waits()
"""
IN_PYTHON = f"""
import subprocess, sys, threading

def parent_waits():
    with subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        try:
            threading.Event().wait()
        finally:
            child.kill()

def test_hangs():
    parent_waits()
"""
IN_NATIVE_CODE = """
import ctypes

def parent_waits():
    lock = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).sem_init(lock, 0, 0)
    while True:
        ctypes.PyDLL(None).sem_wait(lock)

def test_hangs():
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    parent_waits()
"""


def said(folder: Path, test: str) -> str:
    """Run a file of tests in a process of its own that gives each 3 s; return what it said."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(test)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            folder,
            "--timeout",
            "3",
            folder,
        ],
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_hang_shows_the_stacks_of_a_test_and_of_its_processes(tmp_path: Path) -> None:
    text = said(tmp_path, IN_PYTHON)
    assert re.search(r"line \d+ in parent_waits", text)
    assert re.search(r"line \d+ in child_waits", text)
    assert re.search(r"^=+ 1 failed in ", text, re.MULTILINE)


def test_a_hang_in_native_code_shows_the_stack_and_ends(tmp_path: Path) -> None:
    text = said(tmp_path, IN_NATIVE_CODE)
    assert re.search(r"line \d+ in parent_waits", text)


@pytest.mark.parametrize("text", ["\udcff"])
def test_a_report_need_not_be_utf_8(text: str) -> None:
    print(text)  # pytest-xdist, where it runs this, would end over it
