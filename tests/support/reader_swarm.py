"""Readers that connect to one node and are killed, one after another; told how many on stdin, says when it is done.

``raw`` and ``verbs`` readers are children that connect and read as a node would, over shm and tcp or over verbs, but
join no cluster; ``node`` readers are nodes. The process that forks them runs no thread of its own. Half of them are
killed while a read is under way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import zmq

from p2pkv import Config, Node
from p2pkv.control.secret import cluster_keys
from p2pkv.control.sockets import ControlClient, Request
from p2pkv.control.wire import Kind, pack_connect, unpack_connected
from p2pkv.transports.base import Transport
from p2pkv.transports.native import ShmTransport, TcpTransport
from p2pkv.transports.verbs import VerbsTransport

N_PAGES, NBYTES = 64, 65536


def read_raw(number: int, address: str, done: Callable[[], None]) -> None:
    read_over([ShmTransport(), TcpTransport()], number, address, done)


def read_verbs(number: int, address: str, done: Callable[[], None]) -> None:
    read_over([VerbsTransport()], number, address, done)


def read_over(transports: list[Transport], number: int, address: str, done: Callable[[], None]) -> None:
    client = ControlClient(zmq.Context(), cluster_keys(None))
    memory = np.zeros((N_PAGES, NBYTES), np.uint8)
    spans = np.array([(i * NBYTES, i * NBYTES, NBYTES) for i in range(N_PAGES)], np.int64)
    for transport in transports:
        endpoint = transport.open()
        reply = client.ask(
            Request(address, Kind.CONNECT, pack_connect(transport.name, endpoint.describe())), 20.0
        )
        assert reply is not None
        assert reply.ok
        half, region = unpack_connected(reply.body)
        endpoint.bind(half)
        remote = endpoint.attach(region)
        local = transport.register_memory(memory, memory.ctypes.data, memory.nbytes, readable=False)
        transfer = endpoint.read(local, remote, spans, words=None)
        if number % 2 or transport is not transports[-1]:
            assert (transfer.wait(20.0) == 0).all()
    done()


def read_as_node(number: int, join: str, done: Callable[[], None]) -> None:
    config = Config(
        node_id=f"reader-{number}", join=[join], pool_size="1MiB", transports=["tcp" if number % 2 else "shm"]
    )
    node = Node.start(config)
    memory = np.zeros((N_PAGES, NBYTES), np.uint8)
    node.register_memory(memory)
    if number % 3 == 0:
        done()
    node.fetch([f"page-{i}" for i in range(N_PAGES)], memory)
    done()


def cycle(number: int, kind: str, address: str) -> None:
    """Fork a reader and kill it when it has read."""
    pipe, told = os.pipe()
    child = os.fork()
    if not child:
        os.close(pipe)
        try:
            {"raw": read_raw, "verbs": read_verbs, "node": read_as_node}[kind](
                number, address, lambda: _tell(told)
            )
            signal.pause()
        finally:
            os._exit(1)
    os.close(told)
    heard = os.read(pipe, 1)
    os.close(pipe)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert heard == b"1", f"reader {number} failed"


def _tell(pipe: int) -> None:
    os.write(pipe, b"1")


@contextmanager
def swarm(kind: str, address: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that lets so many readers come and be killed."""
    process = subprocess.Popen(
        [sys.executable, __file__, kind, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def run(n_readers: int) -> None:
        stdin.write(f"{n_readers}\n")
        stdin.flush()
        assert stdout.readline().strip().isdecimal(), "a reader failed: see above"

    with process:
        try:
            yield run
        finally:
            process.kill()


def main() -> None:
    kind, address = sys.argv[1:]
    number = 0
    for line in sys.stdin:
        for _ in range(int(line)):
            cycle(number, kind, address)
            number += 1
        print(number, flush=True)


if __name__ == "__main__":
    main()
