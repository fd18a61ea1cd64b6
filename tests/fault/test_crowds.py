"""Many connections at once, by strangers and by members: they cost those who make them, and nobody else for good."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cluster import Cluster, eventually
from footprint import Footprint, tcp_ports
from p2pkv import Config, Node
from p2pkv.transports.base import Transport
from p2pkv.transports.native import ShmTransport, TcpTransport
from strangers import Owner

ALL_DOORS = 128
OWN_DOOR = 8
"""As in native/src/net/doorman.h."""


@contextmanager
def limited_to(n: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_strangers_at_all_doors_get_few_descriptors(cluster: Cluster) -> None:
    node = cluster.spawn("node", transports=["tcp"])
    address = node.call("start", **node.settings)["address"]
    control = {int(where.rpartition(":")[2]) for where in (address, cluster.join)}
    doors = [port for port in tcp_ports(node.pid) if port not in control]
    assert len(doors) == 3, "pages, directory channels, links"
    before = Footprint.of(node.pid).n_fds
    strangers = [socket.create_connection(("127.0.0.1", port), 10.0) for _ in range(200) for port in doors]
    most = 0
    for _ in range(50):
        most = max(most, Footprint.of(node.pid).n_fds)
        time.sleep(0.01)  # sampled while the doors work their queues off
    assert before + OWN_DOOR < most <= before + ALL_DOORS + len(doors) * OWN_DOOR + 8
    for stranger in strangers:
        stranger.close()
    eventually(lambda: Footprint.of(node.pid).n_fds <= before, 30.0)


@pytest.mark.parametrize("kind", [ShmTransport, TcpTransport], ids=["shm", "tcp"])
def test_an_owner_full_of_idle_readers_lets_the_next_one_in(kind: type[Transport]) -> None:
    n_fds = len(os.listdir("/proc/self/fd"))
    limit = max(512, 2 * n_fds)
    with kind() as transport, limited_to(limit):
        owner = Owner(transport)
        idle = [owner.enter() for _ in range(limit // 8 + 8)]
        eventually(owner.serves_well, 20.0)
        # those that have waited longest were hung up on; with a reset if what they had said was not read yet
        with suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""
        idle[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)
        for connection in idle:
            connection.close()
        owner.memory.region.close()


def state_of(thread: str) -> str:
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == thread:
            return (task / "stat").read_text().rpartition(")")[2].split()[0]
    raise AssertionError(f"no thread is called {thread}")


def test_a_forked_child_does_not_make_the_directory_spin(cluster: Cluster) -> None:
    """It keeps the connections of before, whose end would be reported for as long as it lives."""
    with Node.start(Config(pool_size="1MiB", buffer_size=0, transports="shm")) as node:
        peer = cluster.spawn("peer", join=[node.address])
        peer.start()
        keys = [f"page-{i}" for i in range(64)]

        def has_channel() -> bool:
            peer.call("exists", keys=keys)
            return node.counters()["p2pkv_directory_channels"] > 0

        eventually(has_channel, 20.0)
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        try:
            peer.kill()
            eventually(lambda: node.counters()["p2pkv_directory_channels"] == 0, 20.0)
            # a thread that spins is runnable whenever one looks, however busy the machine is
            states = []
            for _ in range(40):
                states.append(state_of("p2pkv-directory"))
                time.sleep(0.01)
            assert states.count("R") < 20, states
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
