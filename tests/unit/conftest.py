"""Fixtures for tests in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import eventually
from hicache_backends import Open, storage_config
from kept_nodes import kept_at
from p2pkv import Config, Node
from p2pkv.integrations.sglang.weights import Weights
from p2pkv.integrations.sglang_hicache import P2PKVHiCache
from p2pkv.testing.ports import free_port
from vllm_engine import EngineFake
from vllm_instances import Open as OpenEngine


@pytest.fixture
def open_backend(hosts_node: Node | None) -> Iterator[Open]:
    """Open backends of one cluster: ``open(pool, settings={...}, **changes of the storage configuration)``."""
    known: dict[str, Any] = {"join": f"127.0.0.1:{free_port()}", "pool_size": "4MiB"}
    if hosts_node is not None:
        known = {"attach": hosts_node.config.attach_listen}
    opened: list[P2PKVHiCache] = []

    def open_one(
        pool: Any = None,
        settings: dict[str, Any] | None = None,
        weights: Weights | None = None,
        **changes: Any,
    ) -> P2PKVHiCache:
        config = storage_config(**changes)
        config.extra_config |= known | (settings or {})
        opened.append(P2PKVHiCache(config, {}, weights=weights))
        if pool is not None:
            opened[-1].register_mem_pool_host(pool)
        n_members = len(opened) if hosts_node is None else 1
        eventually(lambda: all(len(backend.node.members()) == n_members for backend in opened), 10.0)
        return opened[-1]

    yield open_one
    for backend in opened:
        backend.close()


@pytest.fixture
def attached() -> bool:
    """Whether instances attach to their host's node; modules whose tests hold for both have it of two values."""
    return False


@pytest.fixture
def hosts_node(tmp_path: Path, *, attached: bool) -> Iterator[Node | None]:
    """The node of this host, if engines attach to one."""
    if not attached:
        yield None
        return
    folder = tmp_path / "attach"
    folder.mkdir(mode=0o700)
    with Node.start(Config(node_id="host", pool_size="1MiB", attach_listen=f"unix:{folder}/host")) as node:
        yield node


@pytest.fixture
def open_engine(hosts_node: Node | None) -> Iterator[OpenEngine]:
    """Open instances of one cluster: ``open(settings={...}, role=..., policy=...)``, each of a ``kind`` of engine."""
    known: dict[str, Any] = {"join": f"127.0.0.1:{free_port()}"}
    if hosts_node is not None:
        known = {"attach": hosts_node.config.attach_listen}
    opened: list[EngineFake] = []

    def open_one(
        settings: dict[str, Any] | None = None, *, kind: type[EngineFake] = EngineFake, **options: Any
    ) -> EngineFake:
        base = known | {
            "pool_size": "1MiB",
            "node_id": f"node{len(opened)}",
            "load_deadline": 5.0,
            "deadline": 5.0,
        }
        opened.append(kind(base | (settings or {}), **options))
        nodes = [node for engine in opened for node in engine.nodes]
        n_members = sum(not node.config.attach for node in nodes) + (hosts_node is not None)
        eventually(lambda: all(len(node.members()) == n_members for node in nodes), 20.0)
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[str]:
    """Run a keeper's process, but in a thread, and return its address."""
    with kept_at(tmp_path) as address:
        yield address


@pytest.fixture
def listen(tmp_path: Path) -> str:
    """Where a host's node lets its engines in."""
    (tmp_path / "host").mkdir(mode=0o700)
    return f"unix:{tmp_path}/host/s"
