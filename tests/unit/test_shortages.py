"""A process that has no descriptor left: a node of it starts or says why not, and loses nothing but time."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import zmq

import pages
import short_of
from cluster import eventually
from p2pkv import Config, Node
from p2pkv.address import can_listen_on
from p2pkv.cli.doctor.finding import Verdict
from p2pkv.cli.doctor.machine import _descriptors
from p2pkv.control.secret import cluster_keys
from p2pkv.control.sockets import ControlClient, Request, Socket
from p2pkv.control.wire import Kind
from p2pkv.directory.view import Member, encode
from p2pkv.testing.ports import free_port
from p2pkv.transports.base import Status
from pair import NBYTES, N, Pair


def test_calls_without_a_descriptor_are_misses_and_the_node_goes_on(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    with short_of.descriptors():
        keys = pair.fresh_keys()
        pages.fill(pair.source, keys)
        pair.owner.publish(keys, pair.source, timeout=0.5)
        # Neither has asked the other before: there is no socket to do it with, and none to be had.
        assert not pair.reader.fetch(keys, pair.destination, timeout=0.5).any()
        pair.reader.exists(keys, timeout=0.5)
        threads = {thread.name for thread in threading.enumerate()}
    assert {"p2pkv-membership", "p2pkv-retract", "p2pkv-announce"} <= threads
    eventually(lambda: pair.fetch_is_right(pair.publish()), 5.0)
    pair.close()


_OWN = """
import sys
from p2pkv import _native

owner = _native.shm_transport()
pool = _native.SharedRegion.create(256 << 20)  # more than threads of the reader that begin reserve for a moment
region = owner.register_memory(pool.address, pool.nbytes, pool.fd, True)
print(region.describe().hex(), flush=True)
for half in sys.stdin:
    print(owner.accept(bytes.fromhex(half)).hex(), flush=True)
"""

_READ = """
import subprocess, sys
import numpy as np
import short_of
from p2pkv import _native

command = [sys.executable, "-c", sys.argv[2]]
owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
region = bytes.fromhex(owner.stdout.readline())
reader = _native.shm_transport()
page = np.zeros(4096, np.uint8)
local = reader.register_memory(page.ctypes.data, page.nbytes, -1, False)
lack = {"descriptors": lambda: short_of.descriptors(1), "address_space": lambda: short_of.address_space(8 << 20)}

def read():
    endpoint = reader.open()
    owner.stdin.write(endpoint.describe().hex() + "\\n")
    owner.stdin.flush()
    endpoint.bind(bytes.fromhex(owner.stdout.readline()))
    remote = endpoint.attach(region)
    others = [endpoint.attach(region) for _ in range(int(sys.argv[4]))]  # each of them hears what there is to hear
    transfer = endpoint.read(local, remote, np.array([[0, 0, 4096]], np.int64), np.array([[0, 2]], np.uint64))
    return int(transfer.wait(float(sys.argv[3]))[0])

with lack[sys.argv[1]]():
    short = read()
print(short, read())
owner.communicate()
"""


_UNMAPPED = {
    # This one is always told, whoever hears of it first.
    "descriptors": (60, {Status.PEER_LOST}),
    # Without memory it may also not get as far as that.
    "address_space": (20, {Status.PEER_LOST, Status.TIMED_OUT}),
}
"""By what a reader lacks, the seconds that it waits and what it may then say."""


@pytest.mark.parametrize("n_others", [0, 100])
@pytest.mark.parametrize("lack", _UNMAPPED)
def test_what_a_short_reader_cannot_map_is_lost_not_rejected(lack: str, n_others: int) -> None:
    """Else it would have healthy entries deleted: a rejection says that a page's word was read, and is another."""
    environment = os.environ | {"PYTHONPATH": str(Path(short_of.__file__).parent)}
    seconds, expected = _UNMAPPED[lack]
    read = subprocess.run(
        [sys.executable, "-c", _READ, lack, _OWN, str(seconds), str(n_others)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    short, healthy = map(int, read.stdout.split())
    assert Status(short) in expected
    assert Status(healthy) is Status.REJECTED, "the word is 0 nowhere"


def test_a_join_address_is_not_taken_over_without_a_descriptor() -> None:
    """Libzmq would look the host's addresses up, find no descriptor for it and end the process."""
    address = f"127.0.0.1:{free_port()}"
    assert can_listen_on(address)
    with short_of.descriptors():
        assert not can_listen_on(address)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not can_listen_on(f"127.0.0.1:{taken.getsockname()[1]}")
    assert not can_listen_on("192.0.2.1:7400")
    assert not can_listen_on("localhost:7400")


_START = """
import os, resource, sys
from p2pkv import Config, Node, ConfigError
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, [used + int(sys.argv[1])] * 2)
try:
    Node.start(Config(pool_size="1MiB", buffer_size=0)).close()
    print("started")
except ConfigError as error:
    print("refused:", error)
"""


def test_a_node_starts_or_says_why_not_whatever_the_limit() -> None:
    starts = [
        subprocess.Popen([sys.executable, "-c", _START, str(left)], stdout=subprocess.PIPE, text=True)
        for left in (4, 9, 22, 80)
    ]
    said = [start.communicate(timeout=300)[0] for start in starts]
    assert said[-1] == "started\n"
    for text in said[:-1]:
        assert text.startswith("refused: a node needs 64 file descriptors to start")
        assert "RLIMIT_NOFILE" in text


_LIMIT = """
import resource, sys
from p2pkv import Config, Node
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (512, min(hard, 2048)))
Node.start(Config(pool_size="1MiB", buffer_size=0, raise_nofile=sys.argv[1])).close()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("wanted", "soft"), [("true", 2048), ("false", 512)])
def test_a_node_takes_the_descriptors_that_the_system_allows(wanted: str, soft: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
        pytest.skip("the hard limit of descriptors is below 2048 here")
    command = [sys.executable, "-c", _LIMIT, wanted]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    assert said.split() == [str(soft), "2048"]


def test_a_member_whose_address_nobody_can_have_harms_nobody(tmp_path: Path) -> None:
    """Whoever has the secret may say anything about others; ZMQ refuses to connect to such an address at once."""
    pair = Pair(tmp_path)
    keys = cluster_keys(pair.owner.config.secret_file)
    context: zmq.Context[Socket] = zmq.Context()
    client = ControlClient(context, keys)
    odd = [Member(f"odd-{i}", 1, address) for i, address in enumerate(("a b:1", "[::1:2", "x/y:3", "*:4"))]
    exchange = Request(pair.owner.address, Kind.EXCHANGE, encode("odd", odd))
    assert client.ask(exchange, 2.0) is not None
    eventually(lambda: pair.owner.counters()["p2pkv_membership_deaths_total"] >= len(odd), 10.0)
    assert pair.fetch_is_right(pair.publish())
    assert {member.node_id for member in pair.owner.members()} == {"owner", "reader"}
    client.close()
    context.term()
    pair.close()


def test_a_node_may_have_more_peers_than_zmq_gives_sockets(tmp_path: Path) -> None:
    node = Node.start(Config(pool_size="1MiB", buffer_size=0))
    memory = np.zeros((N, NBYTES), np.uint8)
    node.register_memory(memory)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_peers = 1100
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * n_peers + 500)), hard))
    nobody = f"127.0.0.1:{free_port()}"
    with node._parts.control.gossip.send([Request(nobody, Kind.PROBE)] * n_peers) as calls:
        assert len(calls._pending) == n_peers
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    node.close()


def test_doctor_says_that_there_are_too_few_descriptors() -> None:
    with short_of.descriptors():
        finding = _descriptors()
    assert finding.verdict is Verdict.BAD
    assert "ulimit -n" in finding.advice
