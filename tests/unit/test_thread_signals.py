"""Signals are the interpreter's main thread's: one that a native thread took would interrupt nobody's system call."""

from __future__ import annotations

import signal
from pathlib import Path

from p2pkv import Config, Node

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD]


def test_every_native_thread_of_a_node_is_deaf_to_signals() -> None:
    node = Node.start(Config(pool_size="1MiB", buffer_size="1MiB", transports=["shm", "tcp"]))
    heard: dict[str, list[str]] = {}
    for task in Path("/proc/self/task").iterdir():
        lines = (line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        status = dict(line for line in lines if len(line) == 2)
        blocked = int(status["SigBlk"], 16)
        heard[status["Name"]] = [one.name for one in SIGNALS if not blocked >> (one - 1) & 1]
    node.close()
    native = [name for name in NATIVE if name in heard]
    assert native == NATIVE
    assert {name: heard[name] for name in native if heard[name]} == {}


NATIVE = ["p2pkv-control", "p2pkv-zap", "p2pkv-directory", "p2pkv-links", "p2pkv-tcp-door", "p2pkv-shm-serve"]
