"""What every store of records keeps; a new one adds a line to ``PLACES``. Engines have a contract of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from certificates import Authority, needs_openssl
from etcd_servers import EtcdServers, needs_etcd
from fake_kubernetes import FakeKubernetes
from p2pkv.directory.registry.etcd import EtcdStore
from p2pkv.directory.registry.kubernetes import KubernetesStore
from p2pkv.directory.registry.store import Change, Entry, GapError, Store
from p2pkv.errors import RegistryError
from p2pkv.store_url import read_store_url
from p2pkv.testing.simulated_network import SimulatedClock
from p2pkv.testing.simulated_registry import SimulatedStore, StoreServer

pytestmark = pytest.mark.xdist_group("stores")

TIMEOUT = 5.0


class Place:
    """One service, ways to it, and what is done to it."""

    def __init__(self, undo: ExitStack) -> None:
        self.undo = undo

    def open(self) -> Store:
        """Return another way to it."""
        raise NotImplementedError

    def forget(self) -> None:
        """Have it forget its history."""
        raise NotImplementedError

    def close(self) -> None:
        """End it."""
        raise NotImplementedError


class SimulatedPlace(Place):
    def __init__(self, undo: ExitStack, folder: Path) -> None:
        super().__init__(undo)
        self.server = StoreServer()

    def open(self) -> Store:
        return SimulatedStore(self.server, "n0", SimulatedClock(0.0))

    def forget(self) -> None:
        self.server.compact()

    def close(self) -> None:
        self.server.is_up = False


class EtcdPlace(Place):
    def __init__(self, undo: ExitStack, folder: Path) -> None:
        super().__init__(undo)
        self.servers = EtcdServers(folder, 1)
        undo.callback(self.servers.close)

    def open(self) -> Store:
        store = EtcdStore(read_store_url(self.servers.url), "c")
        self.undo.callback(store.close)
        return store

    def forget(self) -> None:
        # a revision of its own, so that whoever is behind misses one
        self.servers.ctl("put", "/elsewhere", "x")
        self.servers.ctl("compact", str(self.servers.revision()))

    def close(self) -> None:
        self.servers.close()


class KubernetesPlace(Place):
    def __init__(self, undo: ExitStack, folder: Path) -> None:
        super().__init__(undo)
        authority = Authority(folder, "cluster")
        self.api = FakeKubernetes(*authority.issue("api"))
        self.is_closed = False
        undo.callback(self.close)
        token = folder / "token"
        token.write_text("good")
        self.url = (
            f"kubernetes://{self.api.address}?namespace=serving&ca={authority.ca}&token_file={token}&ttl=30"
        )

    def open(self) -> Store:
        store = KubernetesStore(read_store_url(self.url), "c")
        self.undo.callback(store.close)
        return store

    def forget(self) -> None:
        self.api.compact()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.api.close()


PLACES: list[object] = [
    SimulatedPlace,
    pytest.param(EtcdPlace, marks=needs_etcd),
    pytest.param(KubernetesPlace, marks=needs_openssl),
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    make: Callable[[ExitStack, Path], Place] = request.param
    with ExitStack() as undo:
        yield make(undo, tmp_path)


def told(store: Store) -> list[Change]:
    """Return what is told next, and matters."""
    while True:
        changes = store.changes(TIMEOUT)
        assert changes is not None
        if changes:
            return changes


def put(store: Store, name: str, value: bytes, expected: int = 0) -> int:
    version = store.put(name, value, expected, TIMEOUT)
    assert isinstance(version, int)
    return version


def test_what_is_written_is_listed(place: Place) -> None:
    store = place.open()
    assert store.read_all(TIMEOUT).entries == {}
    versions = {name: put(store, name, name.encode()) for name in ("n0", "a/b c", "ü" * 64)}
    contents = place.open().read_all(TIMEOUT)
    assert contents.entries == {name: Entry(name.encode(), version) for name, version in versions.items()}
    assert contents.version >= max(versions.values())


def test_changes_are_told_from_a_list_on(place: Place) -> None:
    store, follower = place.open(), place.open()
    put(store, "n0", b"1")
    contents = follower.read_all(TIMEOUT)
    first = put(store, "n0", b"2", contents.entries["n0"].version)
    follower.watch(contents.version, TIMEOUT)
    assert told(follower) == [Change("n0", b"2", first)]
    second = put(store, "n1", b"3")
    assert second > first
    assert told(follower) == [Change("n1", b"3", second)]
    store.remove("n1", TIMEOUT)
    changes = [change for change in told(follower) if change.name == "n1"]
    assert [(change.value, change.version >= second) for change in changes] == [(None, True)]


def test_nothing_is_written_over_what_was_not_expected(place: Place) -> None:
    store, other = place.open(), place.open()
    version = put(store, "n0", b"1")
    assert other.put("n0", b"2", 0, TIMEOUT) == Entry(b"1", version)
    newer = put(other, "n0", b"2", version)
    assert store.put("n0", b"3", version, TIMEOUT) == Entry(b"2", newer)
    gone = store.put("n1", b"1", version, TIMEOUT)
    assert isinstance(gone, Entry)
    assert gone.version == 0


def test_a_renewal_holds_while_the_record_is_ours(place: Place) -> None:
    store, other = place.open(), place.open()
    version = store.renew("n0", put(store, "n0", b"1"), TIMEOUT)
    assert version is not None
    put(other, "n0", b"2", version)
    assert store.renew("n0", version, TIMEOUT) is None
    assert other.read_all(TIMEOUT).entries["n0"].value == b"2"


def test_a_record_is_removed_but_not_anothers(place: Place) -> None:
    store, other = place.open(), place.open()
    version = put(store, "n0", b"1")
    put(other, "n0", b"2", version)
    store.remove("n0", TIMEOUT)
    assert other.read_all(TIMEOUT).entries["n0"].value == b"2"
    other.remove("n0", TIMEOUT)
    assert other.read_all(TIMEOUT).entries == {}
    other.remove("n0", TIMEOUT)  # nothing is there any more


def test_a_forgotten_history_is_a_gap(place: Place) -> None:
    store, follower = place.open(), place.open()
    version = follower.read_all(TIMEOUT).version
    put(store, "n0", b"1")
    place.forget()
    with pytest.raises(GapError, match="forgotten what came before"):
        _watch_and_hear(follower, version)


def _watch_and_hear(store: Store, since: int) -> None:
    store.watch(since, TIMEOUT)
    told(store)


def test_a_service_that_is_gone_is_said_to_be(place: Place) -> None:
    store = place.open()
    put(store, "n0", b"1")
    place.close()
    with pytest.raises(RegistryError, match=r"does not answer|can't be reached|breaks off"):
        store.read_all(1.0)


# nothing blocks in a simulation
@pytest.mark.parametrize("place", PLACES[1:], indirect=True)
def test_an_interrupted_way_says_so_at_once(place: Place) -> None:
    store = place.open()
    store.read_all(TIMEOUT)
    store.interrupt()
    with pytest.raises(RegistryError, match=r"this node is closing|breaks off"):
        store.read_all(TIMEOUT)
