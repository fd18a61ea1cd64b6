"""A node with another secret than its peers': both sides say so, count it, and go on."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from cluster import eventually
from p2pkv import _native
from p2pkv.control.secret import ClusterKeys, cluster_keys
from p2pkv.control.sockets import ControlClient, ControlServer, Request, Socket
from p2pkv.control.strangers import StrangersLog
from p2pkv.control.wire import Kind
from p2pkv.directory.view import node_key

PROMISED_S = 10.0


def _keys(path: Path) -> ClusterKeys:
    path.touch(mode=0o600)
    path.write_text(f"the secret {path.name} of this test")
    return cluster_keys(str(path))


@pytest.fixture
def ours(tmp_path: Path) -> ClusterKeys:
    return _keys(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> ClusterKeys:
    return _keys(tmp_path / "theirs")


@contextmanager
def _server(keys: ClusterKeys) -> Iterator[tuple[zmq.Context[Socket], ControlServer]]:
    context: zmq.Context[Socket] = zmq.Context()
    server = ControlServer(context, keys, "127.0.0.1:0", _native.Shard(1024))
    server.loop.announce(node_key("server"), 17)
    server.start()
    try:
        yield context, server
    finally:
        server.close()
        context.term()


@contextmanager
def _node(secret: Path, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "from p2pkv.cli import main; main()", "node", "--set", f"secret_file={secret}"]
        + [part for setting in ("pool_size=1MiB", *settings) for part in ("--set", setting)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _said(process: subprocess.Popen[bytes], what: str, stream: str, until: float) -> str:
    """Return what the process has printed once ``what`` is in it."""
    pipe = getattr(process, stream)
    text = ""
    while what not in text:
        ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
        assert ready, f"{what!r} was not said in time; this was: {text}"
        piece = os.read(pipe.fileno(), 65536)
        assert piece, f"the process ended: {text}"
        text += piece.decode()
    return text


def test_both_sides_say_it_with_the_address_and_the_remedy(
    tmp_path: Path, ours: ClusterKeys, theirs: ClusterKeys
) -> None:
    with ExitStack() as nodes:
        right = nodes.enter_context(_node(tmp_path / "ours", "node_id=right"))
        address = _said(right, "transports", "stdout", time.monotonic() + 60).split()[4].rstrip(",")
        wrong = nodes.enter_context(_node(tmp_path / "theirs", "node_id=wrong", f"join={address}"))
        _said(wrong, "listens on", "stdout", time.monotonic() + 60)
        until = time.monotonic() + PROMISED_S
        seen = _said(wrong, "is secret_file the cluster's?", "stderr", until)
        assert f"no node answers at join address {address}" in seen
        assert "does not let us in" in seen
        said = _said(right, "has another secret", "stderr", until)
        assert "from 127.0.0.1" in said
        assert "the same secret_file" in said


def test_every_attempt_counts_and_friends_are_answered(ours: ClusterKeys, theirs: ClusterKeys) -> None:
    with _server(ours) as (context, server):
        stranger, friend = ControlClient(context, theirs), ControlClient(context, ours)
        request = Request(server.address, Kind.PROBE)
        with stranger.send([request] * 50):
            eventually(lambda: server.refused >= 50, PROMISED_S)
            assert friend.ask(request, 10.0) is not None
        stranger.close()
        friend.close()


def test_a_connection_that_is_only_opened_is_no_stranger(ours: ClusterKeys) -> None:
    with _server(ours) as (context, server):
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port))) as health_check:
            assert health_check.recv(10)[:1] == b"\xff"
        friend = ControlClient(context, ours)
        # its handshake comes after the other's end, and both are noticed in order
        assert friend.ask(Request(server.address, Kind.PROBE), 10.0) is not None
        assert server.refused == 0
        friend.close()


def test_nothing_is_left_of_a_server_that_strangers_besieged(ours: ClusterKeys, theirs: ClusterKeys) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def besiege() -> None:
        with _server(ours) as (context, server):
            stranger = ControlClient(context, theirs)
            with stranger.send([Request(server.address, Kind.PROBE)] * 8):
                eventually(lambda: server.refused > 0, PROMISED_S)
                server.close()
            stranger.close()

    before = descriptors()
    for _ in range(20):
        besiege()
    assert descriptors() == before


def test_the_log_has_one_line_however_many_come(caplog: pytest.LogCaptureFixture) -> None:
    refusals = _native.Refusals()
    for host in range(10_000):
        refusals.note(f"10.0.{host // 250}.{host % 250}")
    log = StrangersLog(refusals)
    eventually(lambda: "10000 connections" in caplog.text, PROMISED_S)
    refusals.note("10.1.0.1")
    log.close()
    (line,) = (record.getMessage() for record in caplog.records)
    assert len(line) < 400, "only some of the addresses"
