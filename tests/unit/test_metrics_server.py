"""A node's HTTP side, and what strangers who reach its port can take of the node."""

from __future__ import annotations

import errno
import os
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from cluster import eventually
from p2pkv.bounded_server import MAX_CONNECTIONS
from p2pkv.metrics import Metrics
from p2pkv.metrics_server import MetricsServer

CONNECTION = "p2pkv-metrics-connection"


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, Metrics(), lambda: None)
    server.start()
    yield server
    server.close()


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 20)


def ask(server: MetricsServer, path: str = "/healthz") -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60) as answer:
        body: bytes = answer.read()
        return body


def n_serving() -> int:
    return sum(thread.name == CONNECTION for thread in threading.enumerate())


def test_who_connects_and_says_nothing_keeps_nobody_out_and_takes_no_more_than_so_many_threads(
    server: MetricsServer,
) -> None:
    silent = [connect(server) for _ in range(3 * MAX_CONNECTIONS)]
    try:
        assert ask(server) == b"ok\n"
        assert b"p2pkv" in ask(server, "/metrics")
        eventually(lambda: n_serving() <= MAX_CONNECTIONS, 10.0)
    finally:
        for connection in silent:
            connection.close()


def test_who_says_nothing_for_long_is_hung_up_on(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv.metrics_server._Quiet.timeout", 0.05)
    with connect(server) as silent, connect(server) as slow:
        slow.send(b"GET /metrics HTTP/1.1\r\nHost: ")
        assert silent.recv(1) == b""
        assert slow.recv(1) == b""
    eventually(lambda: n_serving() == 0, 10.0)


def test_who_does_not_read_his_answers_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * (64 << 20)  # more than the buffers of a connection take
    server = MetricsServer("127.0.0.1", 0, Metrics(), lambda: long)
    server.start()
    silent = []
    try:
        for _ in range(2):
            silent.append(connect(server))
            silent[-1].sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
        eventually(lambda: n_serving() == 2, 10.0)
        silent += [connect(server) for _ in range(2 * MAX_CONNECTIONS)]
        assert ask(server) == b"ok\n"
    finally:
        for connection in silent:
            connection.close()
        server.close()


def test_a_server_without_descriptors_pauses(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = threading.Semaphore(3)
    pauses: list[float] = []

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        if lacking.acquire(blocking=False):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(self)

    real = socket.socket.accept
    monkeypatch.setattr("p2pkv.bounded_server.time.sleep", pauses.append)
    monkeypatch.setattr(socket.socket, "accept", accept)
    assert ask(server) == b"ok\n"
    assert len(pauses) == 3


def test_closing_ends_connections(server: MetricsServer) -> None:
    with connect(server) as connection:
        assert ask(server) == b"ok\n"
        server.close()
        assert connection.recv(1) == b""
    assert n_serving() == 0
