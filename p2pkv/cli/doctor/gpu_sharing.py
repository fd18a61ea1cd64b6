"""The doctor's trial of CUDA IPC: a process of its own maps device memory, and sends back what it reads there.

Run as a module this is that process: it is given a Unix socket, over which it gets what to map, and answers with the
bytes, or with why it has none.
"""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
from typing import BinaryIO

from p2pkv import _native
from p2pkv.memory.staging import use_library as use_cuda_library

_WAIT_S = 30.0
"""Setting up CUDA takes seconds where a machine has many devices."""
_LONGEST_LINE = 4096


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
            command = [sys.executable, "-m", "p2pkv.cli.doctor.gpu_sharing", str(there.fileno())]
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
    line = answers.readline(_LONGEST_LINE)
    if not line.endswith(b"\n"):
        raise RuntimeError("the process that was to map it died")
    problem = json.loads(line)["problem"]
    if problem:
        raise RuntimeError(problem)
    return answers.read(nbytes)


def _map(told: dict[str, str | int], fd: int) -> bytes:
    use_cuda_library(str(told["library"]))
    device = _native.CudaDevice.open(int(told["device"]))
    shared = bytes.fromhex(str(told["shared"]))
    return _native.CudaMapped.map(device, shared, fd, int(told["nbytes"])).read()


def _serve(connection: socket.socket) -> None:
    line, fds, _, _ = socket.recv_fds(connection, _LONGEST_LINE, 1)
    found, problem = b"", ""
    try:
        found = _map(json.loads(line), fds[0] if fds else -1)
    except (RuntimeError, OSError) as error:
        problem = str(error)
    connection.sendall(json.dumps({"problem": problem}).encode() + b"\n" + found)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        _serve(given)
