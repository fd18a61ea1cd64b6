"""Processes that hold pages for others can't be looked into by others of their user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

# Root may trace everybody by a capability. Without it he may look into his own processes, as any other user.
LIKE_ANYBODY = ["setpriv", "--bounding-set", "-sys_ptrace"] if os.geteuid() == 0 else []

LOOK_IN = """
import os, sys
for look in (lambda: os.readlink(f"/proc/{sys.argv[1]}/fd/0"), lambda: open(f"/proc/{sys.argv[1]}/mem", "rb")):
    try:
        look()
        print("open", end=" ")
    except PermissionError:
        print("closed", end=" ")
"""


def started(arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    command = [*LIKE_ANYBODY, sys.executable, *arguments]
    return subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", **options
    )


def looked_into(pid: int) -> str:
    """Return what a process of the same user finds."""
    said, _ = started(["-I", "-S", "-c", LOOK_IN, str(pid)]).communicate(timeout=60)
    return said.strip()


@contextmanager
def running(*command: str) -> Iterator[int]:
    """Run a command until it has said its first line."""
    with tempfile.TemporaryDirectory(prefix="p2pkv-") as folder:
        line = [part.format(folder=folder) for part in command]
        process = started(line, env={**os.environ, "XDG_STATE_HOME": folder})
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "it has ended"
            yield process.pid
        finally:
            process.terminate()
            process.communicate(timeout=60)


pytestmark = pytest.mark.skipif(
    bool(LIKE_ANYBODY) and shutil.which("setpriv") is None, reason="root, and no setpriv (Debian: util-linux)"
)


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "p2pkv", "node", "--set", "listen=127.0.0.1:0", "--set", "pool_size=8MiB"],
        ["-m", "p2pkv", "keeper", "unix:{folder}/keeper"],
    ],
    ids=["node", "keeper"],
)
def test_no_process_of_the_same_user_looks_into_it(command: list[str]) -> None:
    with running(*command) as pid:
        assert looked_into(pid) == "closed closed"


def test_another_process_of_the_same_user_is_open() -> None:
    with running("-c", "print('here', flush=True); input()") as pid:
        assert looked_into(pid) == "open open"
