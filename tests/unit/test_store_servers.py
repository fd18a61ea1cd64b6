"""One of a store's servers is another service, or refuses what the others allow: these are asked."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from certificates import Authority, needs_openssl
from fake_kubernetes import FakeKubernetes
from p2pkv.directory.registry.etcd import EtcdStore
from p2pkv.directory.registry.kubernetes import KubernetesStore
from p2pkv.directory.registry.store import Store
from p2pkv.directory.registry.stores import make_store
from p2pkv.errors import RegistryError
from p2pkv.store_url import read_store_url

NOTHING = {"header": {"revision": "5"}, "metadata": {"resourceVersion": "5"}, "items": []}
"""Both kinds of store say this where there are no records."""
ODD = {
    "an old etcd": (404, {"message": "page not found"}),
    "another service": (200, {"status": "ok"}),
    "another gateway to gRPC": (404, {"code": 5, "message": "Not Found", "details": []}),
    "one that answers a list": (200, ["ok"]),
    "one that answers a text in place of a number": (200, {"header": "5", "metadata": "5", "items": 5}),
    "one of another secret": (401, {"code": 16, "message": "invalid auth token"}),
    "one with other rights": (403, {"code": 7, "message": "permission denied"}),
}


class Server(ThreadingHTTPServer):
    """Answers everything with one status and body."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None, status: int, body: object) -> None:
        self.n_asked = 0
        outer, text = self, json.dumps(body).encode()

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                outer.n_asked += 1
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = answer  # noqa: N815 - the base class's names

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


@pytest.fixture(params=[EtcdStore, KubernetesStore])
def store_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Make a store of servers that answer so, as (status, body)."""
    kind: type[EtcdStore | KubernetesStore] = request.param
    tls, options, scheme = None, "", "etcd"
    if kind is KubernetesStore:
        authority = Authority(tmp_path, "ours")
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*authority.issue("server"))
        (tmp_path / "token").write_text("token")
        options = f"?ca={authority.ca}&token_file={tmp_path / 'token'}&namespace=n"
        scheme = "kubernetes"
    with ExitStack() as undo:

        def make(*answers: tuple[int, object]) -> Store:
            servers = [Server(tls, *answer) for answer in answers]
            for server in servers:
                undo.callback(server.server_close)
                undo.callback(server.shutdown)
            url = f"{scheme}://{','.join(server.address for server in servers)}{options}"
            store = kind(read_store_url(url), "c")
            undo.callback(store.close)
            return store

        yield make


@needs_openssl
@pytest.mark.parametrize("what", ODD)
def test_the_next_server_is_asked_where_one_is_not_what_it_should_be(
    what: str, store_of: Callable[..., Store]
) -> None:
    store = store_of(ODD[what], (200, NOTHING), (200, NOTHING))
    n_failed = 0
    for _ in range(2):  # whichever was drawn to be the first
        for _ in range(3):
            try:
                assert store.read_all(10.0).version == 5
                store.leave_server()
            except RegistryError:
                n_failed += 1
    assert n_failed == 2, "it is asked in its turn, and never again before the others"


@needs_openssl
def test_nobody_is_asked_for_the_passphrase_of_a_key(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path, "ours").issue("client")
    locked = tmp_path / "locked.key"
    arguments = ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", str(key), "-out", str(locked)]
    subprocess.run(arguments, check=True, capture_output=True)
    store = EtcdStore(read_store_url(f"etcds://127.0.0.1:1?cert={cert}&key={locked}"), "c")
    with pytest.raises(RegistryError, match=r"cannot read .*locked.key for TLS: it has a passphrase"):
        store.read_all(10.0)
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "etcd://127.0.0.1:1?user=u&password_file={}",
        "etcds://127.0.0.1:1?ca={}",
        "etcds://127.0.0.1:1?cert={}&key={}",
        "kubernetes://127.0.0.1:1?token_file={}&namespace=n",
    ],
)
def test_a_file_of_a_store_that_is_none_is_refused_and_not_waited_for(tmp_path: Path, url: str) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    store = make_store(read_store_url(url.format(path, path)), "c")
    failures: list[RegistryError] = []

    def read() -> None:
        try:
            store.read_all(10.0)
        except RegistryError as error:
            failures.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(20.0)
    (failure,) = failures
    assert re.search(r"cannot read .*fifo.*: it is no regular file", str(failure))
    store.close()


class FullEtcd(BaseHTTPRequestHandler):
    """Takes one write; then its disk is full."""

    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        call = self.path.removeprefix("/v3/")
        is_full = call == "kv/txn" and call in self.asked
        self.asked.append(call)
        answers = {
            "lease/grant": {"ID": "3", "TTL": "10"},
            "lease/keepalive": {"result": {"ID": "3", "TTL": "10"}},
            "kv/txn": {"header": {"revision": "5"}, "succeeded": True},
        }
        answer = {"code": 8, "message": "mvcc: database space exceeded"} if is_full else answers[call]
        text = json.dumps(answer).encode()
        self.send_response(429 if is_full else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        pass


def test_a_record_that_can_not_be_changed_in_a_full_etcd_stays_what_it_was() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), FullEtcd) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        store = EtcdStore(read_store_url(f"etcd://127.0.0.1:{server.server_address[1]}"), "c")
        FullEtcd.asked.clear()
        assert store.put("n", b"before", 0, 10.0) == 5
        FullEtcd.asked.append("now")
        with pytest.raises(RegistryError, match="database space exceeded"):
            store.put("n", b"after", 5, 10.0)
        store.close()
        server.shutdown()
    assert FullEtcd.asked[FullEtcd.asked.index("now") :] == ["now", "lease/keepalive", "kv/txn"]


@needs_openssl
def test_a_record_that_one_server_could_not_take_away_is_taken_away_at_the_next(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    api = FakeKubernetes(*authority.issue("server"))
    (tmp_path / "token").write_text("good")
    options = f"ca={authority.ca}&token_file={tmp_path / 'token'}&namespace={api.namespace}"
    store = KubernetesStore(read_store_url(f"kubernetes://{api.address}?{options}"), "c")
    assert isinstance(store.put("n", b"record", 0, 10.0), int)
    rights, api.tokens = api.tokens, {}
    with pytest.raises(RegistryError):
        store.remove("n", 10.0)
    api.tokens = rights
    store.remove("n", 10.0)
    assert api.objects == {}
    store.close()
    api.close()


class FailingEtcd(BaseHTTPRequestHandler):
    """Refuses to take a lease away the first time."""

    revoked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer: dict[str, object] = {"ID": "3", "TTL": "10", "header": {"revision": "5"}, "succeeded": True}
        if self.path.endswith("revoke"):
            self.revoked.append(request["ID"])
            if len(self.revoked) == 1:
                answer = {"code": 14, "message": "etcdserver: no leader"}
        text = json.dumps(answer).encode()
        self.send_response(503 if "code" in answer else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        pass


def test_a_lease_that_could_not_be_taken_away_is_taken_away_later() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), FailingEtcd) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        store = EtcdStore(read_store_url(f"etcd://127.0.0.1:{server.server_address[1]}"), "c")
        FailingEtcd.revoked.clear()
        assert store.put("n", b"record", 0, 10.0) == 5
        with pytest.raises(RegistryError, match="no leader"):
            store.remove("n", 10.0)
        store.remove("n", 10.0)
        store.remove("n", 10.0)
        store.close()
        server.shutdown()
    assert FailingEtcd.revoked == ["3", "3"]
