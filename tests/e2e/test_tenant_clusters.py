"""Tenants, with nodes as processes: who has a tenant's secret reads its pages, and nobody else finds or reads them.

Nodes ``a`` and ``b`` have the tenant's secret, ``c`` has the cluster's alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster, NodeProcess, eventually
from footprint import Footprint, abstract_sockets, tcp_ports
from p2pkv.testing.ports import free_port
from tenancy import Secrets

NBYTES = 16384
KEYS = [f"page-{i}" for i in range(16)]


@pytest.fixture
def secret(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path)


@pytest.fixture(params=["tcp", "shm"])
def cluster(request: pytest.FixtureRequest, secret: Secrets) -> Iterator[Cluster]:
    with Cluster(transports=[request.param], secret_file=secret("cluster"), buffer_size=0) as cluster:
        yield cluster


def tenants(secret: Secrets, *names: str, **more: Any) -> dict[str, Any]:
    return {name: {"secret_file": secret(name), "pool_size": "16MiB"} | more for name in names}


def meet(tenant: str, *nodes: NodeProcess) -> None:
    ids = {node.node_id for node in nodes}
    for node in nodes:
        eventually(lambda node=node: {m["node_id"] for m in node.call("members", tenant=tenant)} == ids, 10.0)


def all_are_fetched(node: NodeProcess, keys: list[str], tenant: str = "") -> None:
    def are_there() -> bool:
        answer = node.call("fetch", keys=keys, nbytes=NBYTES, tenant=tenant)
        assert answer["wrong"] == []
        return all(answer["hits"])

    eventually(are_there, 10.0)


def finds(node: NodeProcess, keys: list[str], tenant: str = "") -> bool:
    """Whether a node finds any of the pages, by looking or by reading."""
    exists = node.call("exists", keys=keys, tenant=tenant)["hits"]
    fetched = node.call("fetch", keys=keys, nbytes=NBYTES, tenant=tenant)
    assert fetched["wrong"] == []
    return any(exists) or any(fetched["hits"])


def test_who_has_the_secret_reads_and_nobody_else(cluster: Cluster, secret: Secrets) -> None:
    a = cluster.start("a", tenants=tenants(secret, "acme", "zen"))
    b = cluster.start("b", tenants=tenants(secret, "acme"))
    c = cluster.start("c", namespace="acme")
    cluster.meet(a, b, c)
    meet("acme", a, b)
    assert all(a.call("publish", keys=KEYS, nbytes=NBYTES, tenant="acme"))
    all_are_fetched(b, KEYS, "acme")
    of_b = [f"b-{key}" for key in KEYS]
    assert all(b.call("publish", keys=of_b, nbytes=NBYTES, tenant="acme"))
    all_are_fetched(a, of_b, "acme")
    for keys in (KEYS, of_b):
        assert not finds(c, keys), "by the name of the namespace, and without its secret"
        assert not finds(a, keys)
        assert not finds(a, keys, "zen")
        assert not finds(b, keys)
    # neither is what others publish under that name taken for the tenant's
    of_c = [f"c-{key}" for key in KEYS]
    assert all(c.call("publish", keys=of_c, nbytes=NBYTES))
    assert not finds(a, of_c, "acme")
    assert not finds(b, of_c, "acme")
    all_are_fetched(b, KEYS, "acme")


def test_who_has_a_tenants_secret_alone_is_no_member_of_the_cluster(
    cluster: Cluster, secret: Secrets
) -> None:
    address = f"127.0.0.1:{free_port()}"
    a = cluster.start("a", tenants=tenants(secret, "acme", cluster="acme", listen=address))
    assert all(a.call("publish", keys=KEYS, nbytes=NBYTES, tenant="acme"))
    of_cluster = [f"cluster-{key}" for key in KEYS]
    assert all(a.call("publish", keys=of_cluster, nbytes=NBYTES))
    lone = {"secret_file": secret("acme"), "cluster": "acme", "namespace": "acme"}
    d = cluster.start("d", join=[address, cluster.join], **lone)
    eventually(lambda: {m["node_id"] for m in d.call("members")} == {"a", "d"}, 10.0)
    eventually(lambda: all(d.call("exists", keys=KEYS)["hits"]), 10.0)
    assert not finds(d, of_cluster)
    assert {m["node_id"] for m in a.call("members")} == {"a"}
    eventually(lambda: a.call("counters")["p2pkv_refused_strangers_total"] > 0, 20.0)


def test_who_fills_his_pool_takes_nothing_from_others(cluster: Cluster, secret: Secrets) -> None:
    small = tenants(secret, "acme", "zen", pool_size="1MiB")
    a = cluster.start("a", tenants=small, pool_size="1MiB")
    b = cluster.start("b", tenants=tenants(secret, "acme", "zen"))
    meet("acme", a, b)
    meet("zen", a, b)
    everybody = ("", "acme", "zen")
    for floods in everybody:
        others = [name for name in everybody if name != floods]
        kept = [f"{floods}-kept-{i}" for i in range(16)]
        for name in others:
            assert all(a.call("publish", keys=kept, nbytes=NBYTES, tenant=name))
        for i in range(32):
            flood = [f"{floods}-{i}-{j}" for j in range(16)]
            assert all(a.call("publish", keys=flood, nbytes=NBYTES, tenant=floods))
            for name in others:
                assert all(a.call("fetch", keys=kept, nbytes=NBYTES, tenant=name)["hits"])
        for name in others:
            all_are_fetched(b, kept, name)
        first = [f"{floods}-0-{j}" for j in range(16)]
        assert not any(a.call("fetch", keys=first, nbytes=NBYTES, tenant=floods)["hits"]), (
            "it went over its quota"
        )


def test_a_node_that_is_killed_costs_misses(cluster: Cluster, secret: Secrets) -> None:
    a = cluster.start("a", tenants=tenants(secret, "acme"))
    b = cluster.start("b", tenants=tenants(secret, "acme"))
    meet("acme", a, b)
    of_b = [f"b-{key}" for key in KEYS]
    assert all(a.call("publish", keys=KEYS, nbytes=NBYTES, tenant="acme"))
    assert all(b.call("publish", keys=of_b, nbytes=NBYTES, tenant="acme"))
    all_are_fetched(a, of_b, "acme")
    b.kill()
    answer = a.call("fetch", keys=KEYS + of_b, nbytes=NBYTES, tenant="acme")
    assert answer["wrong"] == []
    assert all(answer["hits"][: len(KEYS)])
    assert not any(answer["hits"][len(KEYS) :])
    again = cluster.start("b", tenants=tenants(secret, "acme"))
    meet("acme", a, again)
    all_are_fetched(again, KEYS, "acme")
    assert all(again.call("publish", keys=of_b, nbytes=NBYTES, tenant="acme"))
    all_are_fetched(a, of_b, "acme")


def test_a_node_that_leaves_hands_its_tenants_pages_over(cluster: Cluster, secret: Secrets) -> None:
    a = cluster.start("a", tenants=tenants(secret, "acme"))
    b = cluster.start("b", tenants=tenants(secret, "acme"))
    meet("acme", a, b)
    cluster.meet(a, b)
    assert all(a.call("publish", keys=KEYS, nbytes=NBYTES, tenant="acme"))
    assert all(a.call("publish", keys=["one"], nbytes=NBYTES))
    drained = a.call("drain", seconds=10.0)
    assert drained["n_pages"] == drained["n_handed_over"] == len(KEYS) + 1
    assert drained["receivers"] == {"b": len(KEYS) + 1}
    a.call("close")
    all_are_fetched(b, KEYS, "acme")


def test_an_engine_attaches_to_its_tenants_node(cluster: Cluster, secret: Secrets, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir(mode=0o700)
    path = f"unix:{tmp_path}/host/acme"
    a = cluster.start("a", tenants=tenants(secret, "acme", attach_listen=path))
    b = cluster.start("b", tenants=tenants(secret, "acme"))
    meet("acme", a, b)
    engine = cluster.start("engine", attach=path, secret_file=secret("acme"), namespace="acme")
    of_engine = [f" {key}" for key in KEYS]
    eventually(lambda: all(engine.call("publish", keys=of_engine, nbytes=NBYTES)), 10.0)
    eventually(lambda: all(b.call("exists", keys=of_engine, tenant="acme")["hits"]), 10.0)
    assert not finds(a, of_engine)
    assert all(b.call("publish", keys=KEYS, nbytes=NBYTES, tenant="acme"))
    eventually(lambda: all(engine.call("exists", keys=KEYS)["hits"]), 10.0)


def test_what_tenants_take_is_given_back(cluster: Cluster, secret: Secrets, tmp_path: Path) -> None:
    named = tenants(secret, "acme", "zen", disk_size="64MiB", requests=4)
    for name, settings in named.items():
        settings["disk_path"] = str(tmp_path / f"disk-{name}")
    a = cluster.start("a", tenants=named)
    b = cluster.start("b", tenants=tenants(secret, "acme"))
    meet("acme", a, b)

    def use() -> None:
        keys = ["own"]
        assert all(a.call("publish", keys=keys, nbytes=NBYTES, tenant="acme"))
        assert all(a.call("publish", keys=keys, nbytes=NBYTES, tenant="zen"))
        all_are_fetched(b, keys, "acme")

    footprints = []
    for _ in range(3):
        use()
        a.call("close")
        eventually(lambda: [m["node_id"] for m in b.call("members", tenant="acme")] == ["b"], 10.0)
        footprints.append(Footprint.of(a.pid))
        assert tcp_ports(a.pid) == []
        assert abstract_sockets(a.pid) == []
        a.start()
        meet("acme", a, b)
    print(footprints)
    # what the allocator keeps of memory that threads have given back grows for a few rounds, without tenants too
    assert footprints[2].is_as_flat_as(footprints[0], rss=1 << 30)
    assert footprints[0].n_segments == 0


def test_a_tenant_is_moved_to_another_secret_node_by_node(cluster: Cluster, secret: Secrets) -> None:
    def start(name: str, uses: str, accepts: list[str]) -> NodeProcess:
        own = {"secret_file": secret(uses), "accepted_secret_files": [secret(other) for other in accepts]}
        node = cluster.start(name, tenants={"acme": own | {"pool_size": "16MiB"}})
        assert all(node.call("publish", keys=[f"{name}-{key}" for key in KEYS], nbytes=NBYTES, tenant="acme"))
        return node

    nodes = {name: start(name, "old", []) for name in ("a", "b")}
    for uses, accepts in (("old", ["new"]), ("new", ["old"]), ("new", [])):
        for name in nodes:
            nodes[name].call("close")
            nodes[name].close()
            nodes[name] = start(name, uses, accepts)
            meet("acme", *nodes.values())
            for reader in nodes.values():
                for owner in nodes:
                    all_are_fetched(reader, [f"{owner}-{key}" for key in KEYS], "acme")
