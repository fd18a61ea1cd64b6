"""The other process of a trial of CUDA IPC: ``python -m p2pkv.memory.mapping_trial FD``.

It is given a Unix socket, over which it gets what to map, and answers with the bytes that it reads there, or with why
it has none. It imports nothing else of p2pkv, since each trial waits for that.
"""

from __future__ import annotations

import json
import socket
import sys

from p2pkv import _native

LONGEST_LINE = 4096
"""Bytes of what is told, and of the answer before the bytes."""


def _map(told: dict[str, str | int], fd: int) -> bytes:
    if told["library"] != "auto":
        _native.cuda_use_library(str(told["library"]))
    device = _native.CudaDevice.open(int(told["device"]))
    shared = bytes.fromhex(str(told["shared"]))
    return _native.CudaMapped.map(device, shared, fd, int(told["nbytes"])).read()


def _serve(connection: socket.socket) -> None:
    line, fds, _, _ = socket.recv_fds(connection, LONGEST_LINE, 1)
    found, problem = b"", ""
    try:
        found = _map(json.loads(line), fds[0] if fds else -1)
    except (RuntimeError, OSError) as error:
        problem = str(error)
    connection.sendall(json.dumps({"problem": problem}).encode() + b"\n" + found)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        _serve(given)
