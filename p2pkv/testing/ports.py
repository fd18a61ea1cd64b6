"""TCP ports that nobody else takes between being found free and being listened on.

The kernel gives every socket that asks for no port in particular one of its ephemeral range, and on a machine that
runs many tests at once it soon gives away one that a test has just found free. So these lie below that range, and each
process has a block of them to itself: it holds a Unix socket of the block's name, which ends with the process.
"""

from __future__ import annotations

import atexit
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

_LOW, _HIGH = 12_000, 30_000
"""Servers' usual ports are below; the node ports of Kubernetes, and Linux's usual ephemeral range, are above."""
_BLOCK = 100


class _Ports:
    """The block of ports that one process has to itself."""

    def __init__(self) -> None:
        """Claim a block; early, so that no test finds a descriptor more after its first call."""
        self._take_block()
        atexit.register(self._end)

    def free(self) -> int:
        if self._pid != os.getpid():  # forked: the block is its parent's, who has a descriptor of its own
            self._claim.close()
            self._take_block()
        return next(self._next)

    def _take_block(self) -> None:
        self._pid = os.getpid()
        self._claim, block = _claim_block()
        self._next = _free_of(block)

    def _end(self) -> None:
        if self._pid == os.getpid():
            self._claim.close()


def _claim_block() -> tuple[socket.socket, range]:
    blocks = [range(low, low + _BLOCK) for low in range(_LOW, _HIGH, _BLOCK)]
    # a machine may give out nearly every port: then blocks are kept apart from one another, and no more
    blocks = [block for block in blocks if block.stop <= _first_ephemeral()] or blocks
    random.shuffle(blocks)
    for block in blocks:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0p2pkv-test-ports-{block.start}")
        except OSError:  # another process has it
            claim.close()
            continue
        return claim, block
    raise RuntimeError(f"other processes have all {len(blocks)} blocks of ports from {_LOW} to {_HIGH}")


def _free_of(block: range) -> Iterator[int]:
    while True:
        n_found = 0
        for port in block:
            if _is_free(port):
                n_found += 1
                yield port
        if not n_found:
            raise RuntimeError(f"none of the ports {block.start} to {block.stop - 1} is free")


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nothing listens on, and that no other caller on this machine is given.

    It comes again only after a hundred others. Not for several threads at once.
    """
    return _ports.free()


def _first_ephemeral() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_ports = _Ports()
