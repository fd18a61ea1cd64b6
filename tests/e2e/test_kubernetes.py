"""Nodes that find each other by Lease objects of Kubernetes, on a server that follows its API."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority, needs_openssl
from cluster import eventually
from fake_kubernetes import FakeKubernetes
from p2pkv import Config, ConfigError, DuplicateNodeError, Node
from p2pkv.cli.doctor.cluster import examine_cluster
from p2pkv.directory.registry.kubernetes import KubernetesStore
from p2pkv.directory.registry.look import try_to_write
from p2pkv.directory.registry.store import Change, Entry, GapError
from p2pkv.errors import MembershipError, RegistryError
from p2pkv.store_url import read_store_url
from p2pkv.testing.lateness import returns_within

pytestmark = needs_openssl

TIMEOUT = 5.0


class Place:
    """An API server, and what a pod finds of it."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder, "cluster")
        self.api = FakeKubernetes(*authority.issue("api"))
        self.ca = authority.ca
        self.others = Authority(folder, "others").ca
        self.token = folder / "token"
        self.token.write_text("good\n")
        self.secret = folder / "secret"
        self.secret.write_text("the secret of a test, long enough")
        self.secret.chmod(0o600)

    def url(self, **options: object) -> str:
        given = {"namespace": "serving", "ca": self.ca, "token_file": self.token, **options}
        return f"kubernetes://{self.api.address}?" + "&".join(
            f"{name}={value}" for name, value in given.items()
        )

    def store(self, **options: object) -> KubernetesStore:
        return KubernetesStore(read_store_url(self.url(**options)), "c")

    def settings(self, node_id: str) -> dict[str, object]:
        return {
            "node_id": node_id,
            "membership": self.url(ttl=10),
            "secret_file": str(self.secret),
            "pool_size": "1MiB",
            "buffer_size": 0,
        }


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.api.close()


@pytest.fixture
def store(place: Place) -> Iterator[KubernetesStore]:
    made = place.store()
    yield made
    made.close()


@pytest.fixture
def follower(place: Place) -> Iterator[KubernetesStore]:
    """Another one's way there, which follows."""
    made = place.store()
    made.watch(made.read_all(TIMEOUT).version, TIMEOUT)
    yield made
    made.close()


def next_changes(store: KubernetesStore) -> list[Change]:
    """Return what is told next, bookmarks left out."""
    while True:
        changes = store.changes(TIMEOUT)
        assert changes is not None
        if changes:
            return changes


def test_records_are_written_renewed_followed_and_removed(
    store: KubernetesStore, follower: KubernetesStore
) -> None:
    version = store.put("node/0 ü", b"record", 0, TIMEOUT)
    assert isinstance(version, int)
    assert next_changes(follower) == [Change("node/0 ü", b"record", version)]
    assert store.put("node/0 ü", b"another", 0, TIMEOUT) == Entry(b"record", version)
    renewed = store.renew("node/0 ü", version, TIMEOUT)
    assert renewed is not None
    assert renewed > version
    assert store.renew("node/0 ü", version, TIMEOUT) is None
    assert [change.value for change in next_changes(follower)] == [b"record"]
    store.remove("node/0 ü", TIMEOUT)
    assert [change.value for change in next_changes(follower)] == [None]
    assert store.read_all(TIMEOUT).entries == {}


def test_a_list_comes_in_pages(place: Place, store: KubernetesStore) -> None:
    place.api.page = 2
    for i in range(5):
        store.put(f"n{i}", b"record", 0, TIMEOUT)
    assert sorted(store.read_all(TIMEOUT).entries) == [f"n{i}" for i in range(5)]


@pytest.mark.parametrize("is_new", [False, True])
def test_a_list_without_an_end_is_given_up(place: Place, store: KubernetesStore, is_new: bool) -> None:
    numbers = itertools.count()

    def endless(*arguments: object) -> tuple[int, dict[str, object]]:
        token = f"page {next(numbers) if is_new else 0}"
        return 200, {"metadata": {"resourceVersion": "5", "continue": token}, "items": []}

    place.api._list = endless  # type: ignore[method-assign,assignment]
    with (
        returns_within(3.0),
        pytest.raises(RegistryError, match="in time" if is_new else "gives a page of its list twice"),
    ):
        store.read_all(0.5)


def test_a_watch_that_ends_is_taken_up_where_it_was_without_a_list(
    place: Place, store: KubernetesStore, follower: KubernetesStore
) -> None:
    place.api.tick(50)
    assert follower.changes(TIMEOUT) == []  # a bookmark
    place.api.end_watches()
    assert follower.changes(TIMEOUT) == []  # the end
    verb, path = place.api.requests[-1]
    assert verb == "watch"
    assert "resourceVersion=150&" in path
    version = store.put("n0", b"record", 0, TIMEOUT)
    assert next_changes(follower) == [Change("n0", b"record", version)]  # type: ignore[arg-type]
    assert [verb for verb, _ in place.api.requests].count("list") == 1


@pytest.mark.parametrize("is_busy", [False, True])
def test_watches_that_end_at_once_are_not_taken_up_without_end(
    place: Place, follower: KubernetesStore, is_busy: bool
) -> None:
    place.api.watch_s = 0.0
    place.api.end_watches()

    def go_on() -> None:
        while True:
            if is_busy:
                place.api.tick()
            follower.changes(TIMEOUT)

    with pytest.raises(RegistryError, match="ends a watch as soon as it has begun"):
        go_on()
    assert [verb for verb, _ in place.api.requests].count("watch") <= 5


@pytest.mark.parametrize("expected_is_known", [False, True])
def test_a_record_is_removed_where_the_answer_to_its_write_was_lost(
    place: Place, store: KubernetesStore, expected_is_known: bool
) -> None:
    expected = 0
    if expected_is_known:
        written = store.put("n0", b"before", 0, TIMEOUT)
        assert isinstance(written, int)
        expected = written
    write = place.api._write

    def write_and_lose_the_answer(kind: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        write(kind, name, body)
        return {"metadata": {}}

    place.api._write = write_and_lose_the_answer  # type: ignore[method-assign]
    with pytest.raises(RegistryError):
        store.put("n0", b"record", expected, TIMEOUT)
    place.api._write = write  # type: ignore[method-assign]
    assert len(place.api.objects) == 1
    store.remove("n0", TIMEOUT)
    assert place.api.objects == {}


def test_the_lease_of_a_stranger_hides_nobody(place: Place, store: KubernetesStore) -> None:
    store.put("n0", b"record", 0, TIMEOUT)
    (made,) = place.api.objects.values()
    place.api.objects["n0"] = made | {"metadata": made["metadata"] | {"name": "n0"}}
    assert store.read_all(TIMEOUT).entries["n0"].value == b"record"
    assert len(store.read_all(TIMEOUT).entries) == 2


def test_what_the_server_has_forgotten_leads_to_a_list(place: Place, follower: KubernetesStore) -> None:
    place.api.tick()
    assert follower.changes(TIMEOUT) == []
    place.api.tick()
    place.api.end_watches()
    place.api.tick()
    place.api.compact()
    with pytest.raises(GapError, match="has forgotten what came before: too old resource version"):
        next_changes(follower)


def test_a_server_that_throttles_is_left_alone_for_as_long_as_it_asks(
    place: Place, store: KubernetesStore
) -> None:
    place.api.throttled = 1
    with pytest.raises(RegistryError, match="has too much to do: Too many requests"):
        store.read_all(TIMEOUT)
    n_requests, began = len(place.api.requests), time.monotonic()
    with pytest.raises(RegistryError, match="wants"):
        store.read_all(TIMEOUT)
    assert len(place.api.requests) == n_requests

    def is_served() -> bool:
        try:
            store.read_all(TIMEOUT)
        except RegistryError:
            return False
        return True

    eventually(is_served, TIMEOUT)
    assert time.monotonic() - began >= 0.9


def test_a_renewed_token_is_used(place: Place, store: KubernetesStore) -> None:
    store.read_all(TIMEOUT)
    place.api.tokens = {"new": place.api.tokens["good"]}
    with pytest.raises(RegistryError, match=r"does not know the token of .*token: Unauthorized"):
        store.read_all(TIMEOUT)
    place.token.write_text("new")
    store.read_all(TIMEOUT)


@pytest.mark.parametrize("held", ["s3cret\nt0ken", "s3cret\u2019t0ken"])
def test_what_is_no_token_is_said_and_not_repeated(place: Place, store: KubernetesStore, held: str) -> None:
    place.token.write_text(held, encoding="utf-8")
    with pytest.raises(RegistryError, match=r"token_file .*token holds no token") as refused:
        store.read_all(TIMEOUT)
    assert "s3cret" not in str(refused.value)
    place.token.write_text("good")
    store.read_all(TIMEOUT)


def test_trying_whether_a_node_may_write_there_changes_nothing(
    place: Place, follower: KubernetesStore
) -> None:
    try_to_write(read_store_url(place.url()), "c", "n0", TIMEOUT)
    place.api.tick()
    assert follower.changes(TIMEOUT) == []


def test_leases_whose_nodes_are_long_gone_are_swept(place: Place, store: KubernetesStore) -> None:
    for name in ("n0", "n1"):
        store.put(name, b"record", 0, TIMEOUT)
    old = next(iter(place.api.objects.values()))
    old["spec"]["renewTime"] = "2020-01-01T00:00:00.000000Z"
    assert len(store.read_all(TIMEOUT).entries) == 1
    assert len(place.api.objects) == 1


def test_what_others_wrote_there_costs_nobody_the_list(place: Place, store: KubernetesStore) -> None:
    store.put("n0", b"record", 0, TIMEOUT)
    (made,) = place.api.objects.values()
    for number, (written, spec) in enumerate(
        [
            ({}, {}),
            (None, {"renewTime": "yesterday"}),
            ({"p2pkv.io/node-id": "n0", "p2pkv.io/record": "not base64!"}, {"renewTime": 7}),
        ]
    ):
        name = f"stranger-{number}"
        metadata = made["metadata"] | {
            "name": name,
            "annotations": written,
            "resourceVersion": str(number),
        }
        place.api.objects[name] = made | {"metadata": metadata, "spec": spec}
    entries = store.read_all(TIMEOUT).entries
    assert entries["n0"].value == b"record"
    assert {entry.value for name, entry in entries.items() if name != "n0"} == {b""}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"token_file": "/nowhere/token"},
            r"cannot read token_file /nowhere/token.*a pod with a service account",
        ),
        ({"namespace": "other"}, r"has no leases in /apis/.*other/leases: .*is the namespace right"),
        ({"ca": "OTHERS"}, r"a certificate that no authority of .*others-ca.pem vouches for"),
    ],
)
def test_a_wrong_option_is_named(place: Place, options: dict[str, object], why: str) -> None:
    store = place.store(**({"ca": place.others} if options.get("ca") == "OTHERS" else options))
    with pytest.raises(RegistryError, match=why):
        store.read_all(TIMEOUT)
    store.close()


def test_an_account_without_rights_is_told_which_lack(place: Place, store: KubernetesStore) -> None:
    place.token.write_text("reader")
    store.read_all(TIMEOUT)
    with pytest.raises(
        RegistryError, match=r'"reader" cannot create.*needs get, list, watch, create, update'
    ):
        store.put("n0", b"record", 0, TIMEOUT)


def test_outside_of_a_pod_the_server_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="this is no pod"):
        Config(membership="kubernetes")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    url = read_store_url("kubernetes")
    assert (url.addresses, url.is_tls, url.ttl) == (("10.0.0.1:443",), True, 600)


def test_nodes_find_each_other_and_the_second_of_an_id_is_refused(place: Place) -> None:
    nodes = [Node.start(Config.load(place.settings(f"n{i}"), environ={})) for i in range(3)]
    eventually(lambda: all(len(node.members()) == 3 for node in nodes), 10.0)
    with pytest.raises(DuplicateNodeError, match="'n0' is in use by a live node"):
        Node.start(Config.load(place.settings("n0"), environ={}))
    said = "\n".join(f.says for f in examine_cluster(Config.load(place.settings("n9"), environ={})))
    assert "can be read and written; 3 nodes of this cluster have records there" in said
    place.api.end_watches()
    place.api.throttled = 3
    nodes.append(Node.start(Config.load(place.settings("n3"), environ={})))
    eventually(lambda: all(len(node.members()) == 4 for node in nodes), 10.0)
    for node in nodes:
        node.close()
    assert place.api.objects == {}


def test_a_node_that_must_join_starts_only_where_another_has_a_record(place: Place) -> None:
    wanted = place.settings("n1") | {"must_join": True}
    with pytest.raises(
        MembershipError, match=r"no other node .* answers at the addresses found in kubernetes://"
    ):
        Node.start(Config.load(wanted, environ={}))
    with (
        Node.start(Config.load(place.settings("n0"), environ={})),
        Node.start(Config.load(wanted, environ={})) as node,
    ):
        assert len(node.members()) == 2
