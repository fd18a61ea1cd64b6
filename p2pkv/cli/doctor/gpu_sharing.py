"""The doctor's trial of CUDA IPC: another process maps device memory, and sends back what it reads there."""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
from typing import BinaryIO

from p2pkv import _native
from p2pkv.memory.mapping_trial import LONGEST_LINE

_WAIT_S = 30.0
"""Setting up CUDA takes seconds where a machine has many devices."""


def read_in_another_process(memory: _native.CudaMemory, nbytes: int, device: int, library: str) -> None:
    """Fill ``memory`` with random bytes, and return if another process has read them all right.

    Blocks for at most a minute. Raises RuntimeError, saying what was not to be had.
    """
    expected = os.urandom(nbytes)
    memory.write(expected)
    shared, fd = memory.share()
    here, there = socket.socketpair()
    try:
        with here, here.makefile("rb") as answers:
            here.settimeout(_WAIT_S)
            command = [sys.executable, "-m", "p2pkv.memory.mapping_trial", str(there.fileno())]
            with subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL) as child:
                there.close()
                try:
                    _tell(
                        here,
                        {"shared": shared.hex(), "nbytes": nbytes, "device": device, "library": library},
                        fd,
                    )
                    found = _answer(answers, nbytes)
                except ConnectionError as error:
                    raise RuntimeError("the process that was to map it died") from error
                except OSError as error:
                    raise RuntimeError(f"the process that was to map it said nothing: {error}") from error
                finally:
                    child.kill()
    finally:
        there.close()
        if fd >= 0:
            os.close(fd)
    if found != expected:
        raise RuntimeError("another process mapped it and read other bytes than are there")


def _tell(to: socket.socket, what: dict[str, object], fd: int) -> None:
    line = json.dumps(what).encode() + b"\n"
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
    to.sendmsg([line], ancillary)


def _answer(answers: BinaryIO, nbytes: int) -> bytes:
    line = answers.readline(LONGEST_LINE)
    if not line.endswith(b"\n"):
        raise RuntimeError("the process that was to map it died")
    problem = json.loads(line)["problem"]
    if problem:
        raise RuntimeError(problem)
    return answers.read(nbytes)
