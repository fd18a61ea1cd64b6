"""What ucx promises beyond the contract of all transports: which network it takes, and readers that take nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from p2pkv import Config, Node, _native, transports
from p2pkv.errors import TransportError
from p2pkv.testing.lateness import returns_within
from p2pkv.testing.transport_fixtures import ENOUGH, Reader, eventually, settled
from p2pkv.testing.transport_peer import NBYTES, PagedMemory, page_spans
from p2pkv.transports import ucx
from p2pkv.transports.ucx import UcxTransport

_MISSING = UcxTransport.unavailable()
needs_ucx = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))


def network_address() -> str:
    """Return an address of this machine that others may reach."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    pytest.skip("this machine has no network")


def sockets_are_full() -> bool:
    """Whether something waits in a socket for a peer to take it: the owner has begun to send."""
    with open("/proc/self/net/tcp") as table:
        return any(line.split()[4].split(":")[0] != "00000000" for line in table.readlines()[1:])


@needs_ucx
def test_a_reader_that_takes_nothing_holds_up_neither_a_region_nor_the_transport() -> None:
    with UcxTransport() as owner, UcxTransport() as ours:
        memory = PagedMemory(owner)
        reader = Reader(ours)
        endpoint, remote = reader.connect(owner.accept, memory.region.describe())
        assert settled(endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)) == [
            "OK"
        ]
        # Far more than sockets hold, and nobody drives the transfer.
        everything = np.array([(0, 0, NBYTES)] * 8, np.int64)
        transfer = endpoint.read(reader.local, remote, everything, words=None)
        assert eventually(sockets_are_full)
        with returns_within(1.0):
            memory.region.close()
        # UCX keeps the tcp connection of an endpoint it has closed, so the reader may learn of it at its deadline.
        statuses = transfer.wait(1.0)
        assert set(settled(statuses)) <= {"PEER_LOST", "TIMED_OUT", "REJECTED", "OK"}
        assert "OK" not in settled(statuses)[1:], "bytes of a closed region were vouched for"

        other = PagedMemory(owner)
        endpoint, remote = reader.connect(owner.accept, other.region.describe())
        assert settled(endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)) == [
            "OK"
        ]
        transfer = endpoint.read(reader.local, remote, everything, words=None)
        with returns_within(1.0):
            owner.close()
        transfer.wait(ENOUGH)


@needs_ucx
def test_tcp_beyond_loopback_needs_a_network_that_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    host = network_address()
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pytest.raises(TransportError, match="trust_network"):
        UcxTransport(host)
    monkeypatch.delenv("UCX_TLS")
    with UcxTransport(host, trusts_network=True) as trusting, UcxTransport() as local:
        assert trusting.domain != local.domain, "one that is on loopback can't be reached from a network"


def test_auto_never_chooses_it() -> None:
    assert "ucx" not in transports.wanted("auto")


def test_asking_for_it_where_it_is_absent_says_what_is_missing() -> None:
    program = "from p2pkv.transports.ucx import UcxTransport; UcxTransport(library='/nowhere/libucp.so.0')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "TransportError" in done.stderr
    assert "/nowhere/libucp.so.0" in done.stderr
    assert "pip install 'p2pkv[ucx]'" in done.stderr


@needs_ucx
def test_a_process_that_has_a_library_gives_no_transport_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, _ = _native.ucx_library()
    with UcxTransport(), UcxTransport(library=loaded):
        pass
    other = tmp_path / "libucp.so.0"
    other.write_bytes(Path(loaded).read_bytes())
    with pytest.raises(TransportError, match="second libucp") as raised:
        UcxTransport(library=str(other))
    assert str(other) in str(raised.value)
    assert loaded in str(raised.value)
    assert "can't be had" in str(UcxTransport.unavailable({"library": str(other)}))
    monkeypatch.setattr(ucx, "wheel_library", lambda: None)
    assert str(ucx.missing("wheel")).endswith("can't be had: the wheel libucx is not installed")


@needs_ucx
def test_of_two_nodes_that_want_different_libraries_the_second_is_told(tmp_path: Path) -> None:
    loaded, _ = _native.ucx_library()
    other = tmp_path / "libucp.so.0"
    other.write_bytes(Path(loaded).read_bytes())

    def start(library: str) -> Node:
        return Node.start(Config(transports=["ucx"], transport_options={"ucx": {"library": library}}))

    with start(loaded) as first:
        with pytest.raises(
            TransportError, match=f"{other} is asked for, but this process has loaded {loaded}"
        ):
            start(str(other))
        with start("auto"):
            assert len(first.members()) == 1, "the nodes of two clusters, over one library"


@needs_ucx
def test_a_transport_that_leaves_the_library_open_takes_the_one_that_another_named() -> None:
    program = (
        "import sys; from p2pkv import _native; from p2pkv.transports.ucx import UcxTransport\n"
        "named = UcxTransport(library=sys.argv[1])\n"
        "with named, UcxTransport(): print(_native.ucx_library()[0])"
    )
    path = _native.ucx_library()[0]
    command = [sys.executable, "-c", program, path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).samefile(path)


def test_the_machines_own_library_comes_first_only_where_it_has_devices_to_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ucx, "wheel_library", lambda: "/wheel/libucp.so.0")
    monkeypatch.setattr(ucx, "_DEVICES", tmp_path)
    assert ucx.libraries() == ["/wheel/libucp.so.0", "libucp.so.0"]
    (tmp_path / "mlx5_0").mkdir()
    assert ucx.libraries() == ["libucp.so.0", "/wheel/libucp.so.0"]
