"""A cluster is moved to another secret, node by node, while it is used: nobody is refused, and nothing is lost.

Each step starts all nodes again, one after the other, so that nodes of this step and of the one before are there
together. Two nodes always have pages that the others read meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster, NodeProcess, all_are_fetched, eventually
from p2pkv.testing.ports import free_port

NBYTES = 16384
STEPS = (("old", ["new"]), ("new", ["old"]), ("new", []))
"""The secret that a node goes by, and those that it accepts besides."""


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, str]:
    paths = {}
    for name in ("old", "new", "another"):
        path = tmp_path / name
        path.touch(mode=0o600)
        path.write_text(f"the secret {name} of this test")
        paths[name] = str(path)
    return paths


class Rotation:
    """Three nodes, of which each has published pages of its own."""

    def __init__(self, cluster: Cluster, secrets: dict[str, str]) -> None:
        self._cluster, self._secrets = cluster, secrets
        self._addresses = {name: f"127.0.0.1:{free_port()}" for name in ("a", "b", "c")}
        self.nodes: dict[str, NodeProcess] = {}
        for name in self._addresses:
            self.start(name, "old", [])
        self.all_meet()

    def settings(self, uses: str, accepts: list[str]) -> dict[str, Any]:
        return {
            "secret_file": self._secrets[uses],
            "accepted_secret_files": [self._secrets[name] for name in accepts],
            "join": list(self._addresses.values()),
        }

    def start(self, name: str, uses: str, accepts: list[str]) -> None:
        settings = self.settings(uses, accepts)
        self.nodes[name] = self._cluster.start(name, listen=self._addresses[name], **settings)
        assert all(self.nodes[name].call("publish", keys=keys_of(name), nbytes=NBYTES))

    def all_meet(self) -> None:
        self._cluster.meet(*self.nodes.values())

    def restart(self, name: str, uses: str, accepts: list[str]) -> None:
        """Have a node leave and come back, while the others read from each other."""
        leaving = self.nodes.pop(name)
        with self.reading():
            leaving.call("close")
            leaving.close()
            self.start(name, uses, accepts)
        self.all_meet()
        for reader in self.nodes.values():
            for owner in self.nodes:
                all_are_fetched(reader, keys_of(owner), NBYTES)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Have those that are there read each other's pages meanwhile: they find them, and find them right."""
        over = threading.Event()
        failures: list[BaseException] = []
        readers = dict(self.nodes)

        def read() -> None:
            try:
                while not over.is_set():
                    for reader in readers.values():
                        for owner in readers:
                            all_are_fetched(reader, keys_of(owner), NBYTES)
            except BaseException as error:  # noqa: BLE001  # told to the thread that waits
                failures.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        for failure in failures:
            raise failure


def keys_of(name: str) -> list[str]:
    return [f"{name}-{i}" for i in range(16)]


def test_a_cluster_is_moved_to_another_secret_node_by_node(cluster: Cluster, secrets: dict[str, str]) -> None:
    rotation = Rotation(cluster, secrets)
    for uses, accepts in STEPS:
        for name in ("a", "b", "c"):
            rotation.restart(name, uses, accepts)
    for stranger, uses, accepts in (("d", "old", []), ("e", "another", []), ("f", "old", ["another"])):
        node = cluster.start(stranger, **rotation.settings(uses, accepts))
        assert all(node.call("publish", keys=keys_of(stranger), nbytes=NBYTES))
        eventually(
            lambda: any(n.call("counters")["p2pkv_refused_strangers_total"] for n in rotation.nodes.values()),
            10.0,
        )
        assert [member["node_id"] for member in node.call("members")] == [stranger]
        assert not any(node.call("exists", keys=keys_of("a"))["hits"])
        for member in rotation.nodes.values():
            assert not any(member.call("exists", keys=keys_of(stranger))["hits"])
            assert {m["node_id"] for m in member.call("members")} == {"a", "b", "c"}
        node.close()


def test_an_engine_goes_on_while_its_node_and_others_are_moved(
    cluster: Cluster, secrets: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "host").mkdir(mode=0o700)
    path = f"unix:{tmp_path}/host/s"
    join = [f"127.0.0.1:{free_port()}"]

    def start(name: str, uses: str, accepts: list[str]) -> NodeProcess:
        settings = {
            "host": {"attach_listen": path, "join": join},
            "other": {"join": join},
            "engine": {"attach": path},
        }
        files = {
            "secret_file": secrets[uses],
            "accepted_secret_files": [secrets[other] for other in accepts],
        }
        node = cluster.start(name, **settings[name], **files)
        if name != "engine":
            assert all(node.call("publish", keys=keys_of(name), nbytes=NBYTES))
        return node

    nodes = {name: start(name, "old", []) for name in ("other", "host", "engine")}
    for uses, accepts in STEPS:
        for name in ("host", "engine", "other"):
            nodes[name].call("close")
            nodes[name].close()
            nodes[name] = start(name, uses, accepts)
            cluster.meet(nodes["host"], nodes["other"])
            for owner in ("host", "other"):
                all_are_fetched(nodes["engine"], keys_of(owner), NBYTES, 10.0)
            fresh = [f"{uses}-{len(accepts)}-{name}-{i}" for i in range(4)]
            eventually(
                lambda fresh=fresh: all(nodes["engine"].call("publish", keys=fresh, nbytes=NBYTES)), 10.0
            )
            all_are_fetched(nodes["other"], fresh, NBYTES)
