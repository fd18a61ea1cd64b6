"""A store that answers too slowly to be of use, in whatever way, is left for another in time."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dripping import BEGINNINGS, DrippingServer
from p2pkv import Config, Node, RegistryError
from p2pkv.control.secret import ClusterKeys
from p2pkv.directory.registry import http_calls
from p2pkv.directory.registry.etcd import EtcdStore
from p2pkv.directory.registry.following import FollowingRegistry
from p2pkv.directory.registry.http_calls import HttpCalls
from p2pkv.directory.registry.look import look
from p2pkv.directory.registry.store import Contents
from p2pkv.store_url import read_store_url
from p2pkv.testing.lateness import returns_within

TIMEOUT = 0.4


@pytest.fixture
def dripping() -> Iterator[Callable[[str], DrippingServer]]:
    made: list[DrippingServer] = []

    def make(what: str) -> DrippingServer:
        made.append(DrippingServer(what))
        return made[-1]

    yield make
    for server in made:
        server.close()


def etcd(*servers: str, scheme: str = "etcd") -> EtcdStore:
    return EtcdStore(read_store_url(f"{scheme}://{','.join(servers)}"), "c")


@pytest.mark.parametrize("what", BEGINNINGS)
def test_a_call_ends_at_its_deadline(what: str, dripping: Callable[[str], DrippingServer]) -> None:
    store = etcd(dripping(what).address, scheme="etcds" if what == "TLS" else "etcd")
    with returns_within(2.0), pytest.raises(RegistryError, match="does not answer in time"):
        store.read_all(TIMEOUT)
    store.close()


@pytest.mark.parametrize("what", ["body", "chunks"])
def test_a_line_that_has_begun_is_not_waited_for_without_end(
    what: str, dripping: Callable[[str], DrippingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_calls, "_REST_OF_LINE_S", TIMEOUT)
    host, _, port = dripping(what).address.partition(":")
    calls = HttpCalls("etcd", ((host, int(port)),), None)
    assert calls.open_stream("POST", "/", None, until=time.monotonic() + 5.0) is None
    with returns_within(2.0), pytest.raises(RegistryError, match="does not answer in time"):
        calls.next_line(60.0)
    calls.hang_up()


BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LINE = b'{"a": 1}\n'


@contextmanager
def stream_of(answer: bytes) -> Iterator[HttpCalls]:
    """Yield a stream of a server that sends all of ``answer`` at once, and then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        calls = HttpCalls("etcd", (("127.0.0.1", server.getsockname()[1]),), None)
        over = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)
                over.wait()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            assert calls.open_stream("POST", "/", None, until=time.monotonic() + 60.0) is None
            yield calls
        finally:
            over.set()
            thread.join()
            calls.hang_up()


@pytest.mark.parametrize(
    "answer",
    [BODY + LINE + b'{"b"', CHUNKS + b"d\r\n" + LINE + b'{"b"\r\n', CHUNKS + b"9\r\n" + LINE + b"\r\n5"],
    ids=["body", "chunk", "length of a chunk"],
)
def test_a_line_that_began_in_the_packet_of_the_one_before_is_not_waited_for_as_a_silent_one(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_calls, "_REST_OF_LINE_S", TIMEOUT)
    with stream_of(answer) as calls:
        assert calls.next_line(60.0) == {"a": 1}
        with returns_within(2.0), pytest.raises(RegistryError, match="does not answer in time"):
            calls.next_line(60.0)


@pytest.mark.parametrize("answer", [BODY + LINE, CHUNKS + b"9\r\n" + LINE + b"\r\n"], ids=["body", "chunk"])
def test_a_stream_that_ends_with_a_whole_line_is_a_silent_one(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stream_of(answer) as calls:
        assert calls.next_line(60.0) == {"a": 1}
        monkeypatch.setattr(http_calls, "_REST_OF_LINE_S", 0.0)
        assert calls.next_line(TIMEOUT) is None


class Healthy(http.server.BaseHTTPRequestHandler):
    """Answers every list: it is empty."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"header": {"revision": "5"}}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        pass


def test_another_server_takes_the_place_of_one_that_drips(dripping: Callable[[str], DrippingServer]) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as healthy:
        threading.Thread(target=healthy.serve_forever, args=(0.05,), daemon=True).start()
        url = f"etcd://{dripping('body').address},127.0.0.1:{healthy.server_address[1]}"
        for _ in range(8):  # whichever is asked first
            with returns_within(3.0):
                assert look(read_store_url(url), ClusterKeys(b"", b"secret"), "c", 2.0).members == ()
        healthy.shutdown()


def test_a_name_whose_look_up_hangs_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hang(*arguments: object, **options: object) -> list[object]:
        over.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "it took too long")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    store = etcd("hangs.test:2379")
    try:
        with returns_within(2.0), pytest.raises(RegistryError, match="can't be looked up"):
            store.read_all(TIMEOUT)
    finally:
        over.set()


def test_a_store_that_was_found_before_is_reached_while_name_servers_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over, asked = threading.Event(), threading.Event()

    def numbers(*arguments: object, **options: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    def hang(*arguments: object, **options: object) -> list[object]:
        asked.set()
        over.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "it took too long")

    monkeypatch.setattr(http_calls, "_FRESH_S", 0.0)
    monkeypatch.setattr(socket, "getaddrinfo", numbers)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as healthy:
        threading.Thread(target=healthy.serve_forever, args=(0.05,), daemon=True).start()
        calls = HttpCalls("etcd", (("store.test", healthy.server_address[1]),), None)
        try:
            assert calls.call("POST", "/", {}, until=time.monotonic() + 60.0).status == 200
            monkeypatch.setattr(socket, "getaddrinfo", hang)
            calls.hang_up()
            with returns_within(2.0):
                assert calls.call("POST", "/", {}, until=time.monotonic() + 60.0).status == 200
            assert asked.wait(60.0)  # so that a store that has moved is found there soon
        finally:
            over.set()
            calls.hang_up()
            healthy.shutdown()


def test_a_node_does_not_start_and_says_so(dripping: Callable[[str], DrippingServer]) -> None:
    server = dripping("body")
    with returns_within(6.0), pytest.raises(RegistryError, match="does not answer in time"):
        Node.start(Config(membership=f"etcd://{server.address}", pool_size="1MiB", buffer_size=0))


def test_a_registry_that_claims_in_vain_closes_in_time(dripping: Callable[[str], DrippingServer]) -> None:
    class OnlyLists(EtcdStore):
        """Its server drips from the first write on."""

        def read_all(self, timeout: float) -> Contents:
            return Contents({}, 0)

        def watch(self, since: int, timeout: float) -> None:
            pass

    url = read_store_url(f"etcd://{dripping('body').address}")
    registry = FollowingRegistry("etcd", lambda: OnlyLists(url, "c"), 10.0)
    registry.open("n", lambda ours, theirs: True, lambda: None, 1.0)
    with returns_within(3.0), pytest.raises(RegistryError, match="does not answer in time"):
        registry.claim(b"v", (), 1.0)
    with returns_within(3.0):
        registry.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_is_ended_by_a_signal_while_its_node_starts(
    number: signal.Signals, dripping: Callable[[str], DrippingServer], tmp_path: Path
) -> None:
    server = dripping("body")
    given = {"membership": f"etcd://{server.address}", "pool_size": "1MiB", "node_id": "n0"}
    options = [option for name, value in given.items() for option in ("--set", f"{name}={value}")]
    with subprocess.Popen(
        [sys.executable, "-m", "p2pkv", "node", *options],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
    ) as process:
        assert server.asked.wait(60.0)
        process.send_signal(number)
        out, _ = process.communicate(timeout=30.0)
    assert "node n0 was ended while it started" in out
    assert process.returncode == 0
