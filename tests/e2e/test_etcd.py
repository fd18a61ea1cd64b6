"""Nodes that find each other by a real etcd, and what is told to whoever gives them a wrong one."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import pages
from cluster import eventually
from etcd_servers import EtcdServers, needs_etcd
from p2pkv import Config, ConfigError, DuplicateNodeError, Node
from p2pkv.cli import app
from p2pkv.cli.doctor.cluster import examine_cluster
from p2pkv.directory.registry.etcd import EtcdStore
from p2pkv.errors import RegistryError
from p2pkv.store_url import read_store_url
from p2pkv.testing.lateness import returns_within
from p2pkv.testing.ports import free_port

pytestmark = [needs_etcd, pytest.mark.xdist_group("etcd")]

N, NBYTES = 8, 4096
SECRET = "the secret of a test, long enough"


class Nodes:
    """Nodes of one cluster, in this process."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self.secret.chmod(0o600)
        self.up: dict[str, Node] = {}
        self.memory: dict[str, Any] = {}

    def start(self, node_id: str, url: str = "", **settings: object) -> Node:
        config = {
            "node_id": node_id,
            "membership": url or self.url,
            "secret_file": str(self.secret),
            "pool_size": "1MiB",
            "buffer_size": 0,
            "deadline": 5.0,
        } | settings
        node = Node.start(Config.load(config, environ={}))
        self.up[node_id] = node
        self.memory[node_id] = np.zeros((N, NBYTES), np.uint8)
        node.register_memory(self.memory[node_id])
        return node

    def agree(self, seconds: float = 15.0) -> bool:
        ids = set(self.up)
        return eventually(
            lambda: all({m.node_id for m in node.members()} == ids for node in self.up.values()), seconds
        )

    def share(self, owner: str, reader: str, name: str) -> bool:
        keys = [f"{name}-{i}" for i in range(N)]
        pages.fill(self.memory[owner], keys)
        assert self.up[owner].publish(keys, self.memory[owner]).all()
        self.memory[reader][:] = 0
        hits = self.up[reader].fetch(keys, self.memory[reader])
        assert pages.wrong(self.memory[reader], keys, hits) == []
        return bool(hits.all())

    def stop(self, node_id: str) -> None:
        self.up.pop(node_id).close()

    def close(self) -> None:
        for node_id in list(self.up):
            self.stop(node_id)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    servers = EtcdServers(tmp_path_factory.mktemp("etcd"), 1)
    yield servers
    servers.close()


@pytest.fixture
def nodes(etcd: EtcdServers, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """A cluster of its own under a prefix of its own."""
    made = Nodes(tmp_path, f"{etcd.url}?ttl=10&prefix=/{request.node.name[:60]}")
    yield made
    made.close()


def test_nodes_find_each_other_and_share_pages(nodes: Nodes, etcd: EtcdServers) -> None:
    for i in range(3):
        nodes.start(f"n{i}")
    assert nodes.agree()
    assert nodes.share("n0", "n2", "page")
    assert nodes.up["n0"].counters()["p2pkv_registry_up"] == 1
    assert nodes.up["n0"].counters()["p2pkv_registry_records"] == 3
    nodes.stop("n1")
    assert nodes.agree()
    names = etcd.ctl("get", "--prefix", nodes.url.partition("prefix=")[2], "--keys-only").split()
    assert [name.rpartition("/")[2] for name in names] == ["n0", "n2"]


def test_nodes_that_start_in_one_moment_find_each_other(nodes: Nodes) -> None:
    threads = [threading.Thread(target=nodes.start, args=(f"n{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(nodes.up) == 4
    assert nodes.agree()


def test_a_second_node_of_an_id_is_refused(nodes: Nodes) -> None:
    first = nodes.start("n0")
    with pytest.raises(DuplicateNodeError, match=rf"'n0' is in use by a live node at {first.address}"):
        nodes.start("n0")
    assert first.counters()["p2pkv_expelled"] == 0


def test_clusters_of_different_names_do_not_meet(nodes: Nodes) -> None:
    a, b = nodes.start("n0", cluster="a"), nodes.start("n1", cluster="b")
    assert {len(a.members()), len(b.members())} == {1}
    assert a.counters()["p2pkv_registry_records"] == 1


def test_a_record_that_is_deleted_or_overwritten_is_put_again(nodes: Nodes, etcd: EtcdServers) -> None:
    nodes.start("n0")
    nodes.start("n1")
    key = f"{nodes.url.partition('prefix=')[2]}/p2pkv/members/n0"
    record = etcd.ctl("get", key, "--print-value-only")
    for harm in (["del", key], ["put", key, "garbage"]):
        etcd.ctl(*harm)
        assert eventually(lambda: etcd.ctl("get", key, "--print-value-only") == record, 10.0)
        assert nodes.agree()
    assert nodes.up["n0"].counters()["p2pkv_registry_lost_records_total"] == 2


def test_a_lease_that_ended_unnoticed_is_replaced(etcd: EtcdServers, monkeypatch: pytest.MonkeyPatch) -> None:
    store = EtcdStore(read_store_url(f"{etcd.url}?prefix=/leases"), "c")
    version = store.put("n0", b"1", 0, 5.0)
    assert isinstance(version, int)
    etcd.ctl("lease", "revoke", f"{int(store._lease or 0):x}")
    with monkeypatch.context() as ended_later:
        ended_later.setattr(store, "_keeps_lease", lambda until: True)
        with pytest.raises(RegistryError, match=r"knows nothing of the lease any more.*lease not found"):
            store.put("n0", b"2", 0, 5.0)
    version = store.put("n0", b"2", 0, 5.0)
    assert isinstance(version, int)
    etcd.ctl("lease", "revoke", f"{int(store._lease or 0):x}")
    version = store.put("n0", b"3", 0, 5.0)
    assert isinstance(version, int)
    assert store.renew("n0", version, 5.0)
    etcd.ctl("lease", "revoke", f"{int(store._lease or 0):x}")
    assert store.renew("n0", version, 5.0) is None
    store.remove("n0", 5.0)
    store.close()


def test_records_that_nobody_with_the_secret_wrote_let_nobody_in(
    nodes: Nodes, etcd: EtcdServers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "liar"
    folder.mkdir()
    liars = Nodes(folder, nodes.url)
    liars.secret.write_text("the secret of somebody else, long enough")
    first = nodes.start("n0")
    liars.start("n1")
    prefix = f"{nodes.url.partition('prefix=')[2]}/p2pkv/members"
    etcd.ctl("put", f"{prefix}/n2", "garbage")
    etcd.ctl("put", f"{prefix}/n3", stdin=b"p2pkv\x02" + bytes(100))
    assert eventually(lambda: first.counters()["p2pkv_registry_refused_records_total"] == 3, 10.0), (
        first.counters()
    )
    assert [member.node_id for member in first.members()] == ["n0"]
    assert "have all nodes the same secret_file?" in caplog.text
    nodes.start("n4")
    assert nodes.agree()
    liars.close()


def test_a_key_that_only_reads_as_a_nodes_name_hides_nobody(etcd: EtcdServers) -> None:
    url = read_store_url(f"{etcd.url}?prefix=/aliases")
    store, follower = EtcdStore(url, "c"), EtcdStore(url, "c")
    store.put("n1", b"record", 0, 5.0)
    store.put("a/b", b"record", 0, 5.0)
    follower.watch(follower.read_all(5.0).version, 5.0)
    for alias in ("n%31", "a/b", "a%2fb"):
        etcd.ctl("put", f"/aliases/c/members/{alias}", "garbage")
        assert follower.changes(5.0) == []
    assert {name: e.value for name, e in store.read_all(5.0).entries.items()} == {
        "n1": b"record",
        "a/b": b"record",
    }
    store.close()
    follower.close()


def test_who_was_refused_a_name_leaves_the_record_of_its_holder(nodes: Nodes, etcd: EtcdServers) -> None:
    nodes.start("n0")
    key = f"{nodes.url.partition('prefix=')[2]}/p2pkv/members/n0"
    record = etcd.ctl("get", key, "--print-value-only")
    with pytest.raises(DuplicateNodeError):
        nodes.start("n0", url=nodes.url)
    assert etcd.ctl("get", key, "--print-value-only") == record


def test_without_etcd_a_node_does_not_start_and_says_why(nodes: Nodes) -> None:
    port = free_port()
    refused = rf"etcd at 127.0.0.1:{port} can't be reached: Connection refused"
    with returns_within(5.0), pytest.raises(RegistryError, match=refused):
        nodes.start("n0", url=f"etcd://127.0.0.1:{port}")


def test_without_etcd_a_node_starts_by_a_join_address_and_is_registered_later(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = nodes.start("n0")
    folder = tmp_path / "etcd"
    folder.mkdir()
    servers = EtcdServers(folder, 1)
    servers.kill(0)
    late = nodes.start("n1", url=f"{servers.url}?ttl=10", join=[first.address])
    assert nodes.agree()
    assert late.counters()["p2pkv_registry_up"] == 0
    assert "joins by its join addresses" in caplog.text
    servers.start(0)
    assert eventually(lambda: late.counters()["p2pkv_registry_records"] == 1, 20.0)
    nodes.stop("n1")
    servers.close()


@contextlib.contextmanager
def another_service(status: int, body: bytes) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (404, b'{"error": "not found"}', "not as etcd 3.4 or newer does"),
        (200, b"<html>hello</html>", "which is not what etcd says"),
        (200, b"{}", "answers what it should not"),
        (200, b"[1, 2]", "which is not what etcd says"),
        (200, b'{"header": {"revision": "1"}, "kvs": [{"key": 7}]}', "answers what it should not"),
        (503, b'{"error": "no leader", "code": 14}', "can't do it: no leader"),
    ],
)
def test_another_service_than_etcd_is_recognized(status: int, body: bytes, why: str) -> None:
    with another_service(status, body) as port:
        store = EtcdStore(read_store_url(f"etcd://127.0.0.1:{port}"), "c")
        with pytest.raises(RegistryError, match=why):
            store.read_all(2.0)
        store.close()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("etcd://", "names no server"),
        (
            "consul",
            r"one of embedded, static, .*etcd://HOST:PORT, etcds://HOST:PORT, kubernetes; not 'consul'",
        ),
        ("etdc://h:1", r"did you mean 'etcd'"),
        ("etcd://h", "must be HOST:PORT"),
        ("etcd://h:0", "ports other than 0"),
        ("etcd://h:1?prefx=/a", "did you mean 'prefix'"),
        ("etcd://h:1?ttl=1", "must be 10 to 3600"),
        ("etcd://h:1?ca=/x", r"for TLS, which etcds:// has"),
        ("etcds://h:1?cert=/x", "cert and key go together"),
        ("etcd://h:1?user=x", "user and password_file go together"),
        ("etcd://h:1?prefix=a", "must begin with '/'"),
        ("etcd://h:1?ttl=10&ttl=20", "twice"),
        ("etcd://h:1?ttl", "no list of option=value"),
    ],
)
def test_a_url_that_is_wrong_is_refused_when_it_is_read(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Config(membership=url)


@pytest.mark.parametrize(
    ("scheme", "instead"),
    [
        ("etcd", r"etcd://HOST:PORT\?user=NAME&password_file=FILE"),
        ("etcds", r"etcds://HOST:PORT\?user=NAME&password_file=FILE"),
        ("kubernetes", r"kubernetes://HOST:PORT\?token_file=FILE"),
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(scheme: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead) as refused:
        Config(membership=f"{scheme}://me:hunter2@h:2379")
    assert "hunter2" not in str(refused.value)


def test_the_commands_find_the_nodes_there(nodes: Nodes, etcd: EtcdServers) -> None:
    nodes.start("n0")
    settings = ["--set", f"membership={nodes.url}", "--set", f"secret_file={nodes.secret}"]
    shown = CliRunner().invoke(app, ["status", "--json", *settings])
    assert shown.exit_code == 0, shown.output
    assert [member["node_id"] for member in json.loads(shown.output)["members"]] == ["n0"]
    empty = CliRunner().invoke(app, ["status", *settings, "--set", "cluster=other"])
    assert "no record of a node of cluster 'other'" in str(empty.exception or empty.output)


def test_the_doctor_says_what_a_node_would_find(nodes: Nodes, etcd: EtcdServers) -> None:
    def said(**settings: object) -> str:
        config = Config.load(
            {"membership": nodes.url, "secret_file": str(nodes.secret), "node_id": "n1"} | settings,
            environ={},
        )
        return "\n".join(f"{f.verdict.name} {f.what}: {f.says}" for f in examine_cluster(config))

    first = nodes.start("n0")
    prefix = nodes.url.partition("prefix=")[2]
    etcd.ctl("put", f"{prefix}/p2pkv/members/n2", "garbage")
    before = etcd.ctl("get", "--prefix", prefix)
    found = said()
    assert "GOOD etcd://127.0.0.1" in found
    assert "can be read and written; 1 nodes of this cluster have records there" in found
    assert "NOTE" in found
    assert "the record of 'n2' (1 such in all) is refused: it is no record of p2pkv" in found
    assert etcd.ctl("get", "--prefix", prefix) == before
    assert f"BAD node_id: a live node at {first.address} has node_id 'n0'" in said(node_id="n0")
    away = said(membership=f"etcd://127.0.0.1:{free_port()}")
    assert "BAD etcd://127.0.0.1" in away
    assert "Connection refused" in away
