"""Whatever a server answers in place of a store is understood, or refused with a sentence; nothing else is raised."""

from __future__ import annotations

import copy
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certificates import Authority, needs_openssl
from p2pkv.directory.registry.etcd import EtcdStore
from p2pkv.directory.registry.kubernetes import KubernetesStore
from p2pkv.directory.registry.store import Store
from p2pkv.errors import RegistryError
from p2pkv.store_url import StoreUrl

pytestmark = needs_openssl

TIMEOUT = 2.0
KEY, VALUE = "L3AycGt2L2MvbWVtYmVycy9uMA==", "cmVjb3Jk"
KV = {"key": KEY, "mod_revision": "7", "value": VALUE, "lease": "3"}
HEADER = {"revision": "9"}
LEASE = {
    "metadata": {
        "name": "p2pkv-0",
        "resourceVersion": "7",
        "annotations": {"p2pkv.io/node-id": "n0", "p2pkv.io/record": VALUE},
    },
    "spec": {"renewTime": "2026-01-01T00:00:00.000000Z", "leaseDurationSeconds": 600},
}
ETCD = [
    {"header": HEADER, "kvs": [KV, KV], "count": "2"},
    {"header": HEADER, "ID": "3", "TTL": "30", "succeeded": True},
    {"header": HEADER, "ID": "3", "responses": [{"response_range": {"kvs": [KV]}}]},
    {
        "result": {
            "header": HEADER,
            "created": True,
            "TTL": "30",
            "events": [{"kv": KV}, {"type": "DELETE", "kv": KV}],
        }
    },
    {"result": {"header": HEADER, "canceled": True, "compact_revision": "5"}},
    {"error": {"grpc_code": 14, "message": "no leader"}, "code": 14, "message": "no leader"},
]
KUBERNETES = [
    {"metadata": {"resourceVersion": "9"}, "items": [LEASE, LEASE]},
    LEASE,
    {"type": "MODIFIED", "object": LEASE},
    {"type": "BOOKMARK", "object": LEASE},
    {"type": "ERROR", "object": {"code": 410, "message": "too old"}},
    {"kind": "Status", "code": 409, "message": "conflict", "details": {"kind": "leases"}},
]
ODD = [None, True, -1, 0, 2**80, 1.5, "", "x", "\ud800", "9" * 5000, [], [None], {}, {"": 1}]


class Server:
    """Answers every request with one status and body, over TLS."""

    def __init__(self, folder: Path) -> None:
        self.answer = (200, b"")
        authority = Authority(folder, "ours")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.issue("server"))
        self.ca = str(authority.ca)
        self.token = folder / "token"
        self.token.write_text("token")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # headers and body are two writes

            def serve(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, body = outer.answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_DELETE = serve  # noqa: N815 - the base class's names

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> tuple[str, int]:
        return "127.0.0.1", self._server.server_address[1]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("answers"))
    yield made
    made.close()


def harmed(random: Random, answers: list[dict[str, Any]]) -> bytes:
    """Return an answer in which something was left out, or is another thing, or that breaks off."""
    answer = copy.deepcopy(random.choice(answers))
    for _ in range(random.randrange(3)):
        at: Any = answer
        while True:
            places: list[Any] = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not places:
                break
            place = random.choice(places)
            if isinstance(at[place], (dict, list)) and random.random() < 0.7:
                at = at[place]
                continue
            if random.random() < 0.3:
                del at[place]
            else:
                at[place] = copy.deepcopy(random.choice([*ODD, *answers]))  # else it might come into itself
            break
    data = json.dumps(answer).encode() + b"\n"
    how = random.random()
    if how < 0.05:
        return b"[" * 100_000
    return data[: random.randrange(len(data))] if how < 0.15 else data


def ask_everything(store: Store) -> None:
    """Do all that can be done; each call returns, or raises what it may."""
    calls: list[Callable[[], object]] = [
        lambda: store.read_all(TIMEOUT),
        lambda: store.put("n0", b"record", 0, TIMEOUT),
        lambda: store.put("n0", b"record", 7, TIMEOUT),
        lambda: store.renew("n0", 7, TIMEOUT),
        lambda: store.watch(7, TIMEOUT),
        lambda: store.changes(TIMEOUT),
        lambda: store.remove("n0", TIMEOUT),
    ]
    for call in calls:
        with suppress(RegistryError):
            call()


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 2**32), status=st.sampled_from([200, 200, 200, 201, 400, 404, 409, 410, 429, 500]))
def test_etcd_or_what_pretends_to_be(server: Server, seed: int, status: int) -> None:
    server.answer = (status, harmed(Random(seed), ETCD))
    with ExitStack() as undo:
        store = EtcdStore(StoreUrl("etcds", (server.endpoint,), 30, ca=server.ca), "c")
        undo.callback(store.close)
        ask_everything(store)


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 2**32), status=st.sampled_from([200, 200, 200, 201, 400, 404, 409, 410, 500]))
def test_kubernetes_or_what_pretends_to_be(server: Server, seed: int, status: int) -> None:
    server.answer = (status, harmed(Random(seed), KUBERNETES))
    with ExitStack() as undo:
        url = StoreUrl(
            "kubernetes",
            (server.endpoint,),
            600,
            ca=server.ca,
            namespace="serving",
            token_file=str(server.token),
        )
        store = KubernetesStore(url, "c")
        undo.callback(store.close)
        ask_everything(store)
