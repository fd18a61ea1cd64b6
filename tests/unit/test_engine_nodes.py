"""Which node of an engine's process does what: one does all, or a member stands beside what is attached."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from p2pkv import Config, Node
from p2pkv.errors import ConfigError, ControlError, DuplicateNodeError, UsageError
from p2pkv.integrations import nodes
from p2pkv.integrations.nodes import EngineNodes, member_beside
from p2pkv.integrations.sglang.pd.settings import pd_config
from p2pkv.testing.ports import free_port

pytestmark = pytest.mark.parametrize("attached", [True])


def test_one_node_does_all_where_nothing_is_attached(attached: bool) -> None:
    config = Config(pool_size="1MiB")
    assert member_beside(config) is config
    engine = EngineNodes.start(config, Node.start, has_pages=True)
    assert engine.cache is engine.member
    assert engine.each == (engine.member,)
    engine.close()
    assert engine.member.is_closed


def test_each_node_has_the_settings_that_are_meant_for_it(hosts_node: Node, attached: bool) -> None:
    port = free_port()
    config = Config(
        attach=hosts_node.config.attach_listen,
        node_id="engine",
        namespace="model",
        listen=f"127.0.0.1:{port}",
        deadline=7.0,
        metrics_port=free_port(),
        buddy_pool_size="1MiB",
    )
    assert config.metrics_port is not None
    engine = EngineNodes.start(config, Node.start, has_pages=True)
    try:
        assert engine.each == (engine.member, engine.cache)
        assert (engine.cache.node_id, engine.member.node_id) == ("engine-pages", "engine")
        assert engine.member.address == f"127.0.0.1:{port}"
        assert {member.node_id for member in engine.member.members()} == {"host", "engine"}
        assert engine.cache.owner_id == "host"
        ports = engine.cache.metrics_port, engine.member.metrics_port
        assert ports == (config.metrics_port, config.metrics_port + 1)
        for node in engine.each:
            assert (node.config.namespace, node.config.deadline) == ("model", 7.0)
        assert (engine.member.config.attach, engine.member.config.pool_nbytes) == ("", 0)

        memory = np.ones((2, 4096), np.uint8)
        engine.register_address(memory.ctypes.data, memory.nbytes, memory, is_offered=True)
        assert engine.cache.publish(["a", "b"], memory, timeout=20.0).all()
        assert hosts_node.counters()["p2pkv_pool_pages"] == 2
        rows = np.array([[memory.ctypes.data, 4096]], np.int64)
        engine.member.transfers.offer("a", rows).withdraw()
        with pytest.raises(UsageError, match="beside it"):
            _ = engine.cache.transfers
        engine.take_back()
        assert engine.cache.exists(["a", "b"], timeout=20.0).all(), "they are left to age"
    finally:
        engine.close()
    assert all(node.is_closed for node in engine.each)


def test_a_process_without_pages_has_the_member_alone(hosts_node: Node, attached: bool) -> None:
    config = Config(attach=hosts_node.config.attach_listen, node_id="engine", metrics_port=free_port())
    engine = EngineNodes.start(config, Node.start, has_pages=False)
    assert engine.each == (engine.member,)
    assert engine.member.metrics_port == config.metrics_port
    engine.close()


def test_a_member_joins_the_hosts_node_unless_it_is_told_whom(hosts_node: Node, attached: bool) -> None:
    attach = hosts_node.config.attach_listen
    assert member_beside(Config(attach=attach)).join_addresses == (hosts_node.address,)
    assert member_beside(Config(attach=attach, join="127.0.0.1:1")).join_addresses == ("127.0.0.1:1",)
    assert not member_beside(Config(attach=attach, membership="etcd://127.0.0.1:1")).join_addresses


def test_a_member_is_of_the_cluster_of_the_hosts_node(tmp_path: Path, attached: bool) -> None:
    folder = tmp_path / "blue"
    folder.mkdir(mode=0o700)
    attach = f"unix:{folder}/host"
    with Node.start(Config(node_id="host", pool_size="1MiB", cluster="blue", attach_listen=attach)):
        assert member_beside(Config(attach=attach, cluster="green")).cluster == "green"
        engine = EngineNodes.start(Config(attach=attach, node_id="engine"), Node.start, has_pages=True)
        try:
            assert {member.node_id for member in engine.member.members()} == {"host", "engine"}
        finally:
            engine.close()


def test_sglangs_transfers_have_a_member_whatever_its_cache_is_attached_to(
    hosts_node: Node, attached: bool
) -> None:
    environ = {"P2PKV_ATTACH": hosts_node.config.attach_listen}
    config = pd_config("127.0.0.1", 1, index=0, environ=environ)
    assert (config.attach, config.pool_nbytes, config.join_addresses) == ("", 0, (hosts_node.address,))
    with Node.start(config) as node:
        assert node.transfers is not None


def test_without_a_node_to_attach_to_nothing_is_left_running(tmp_path: Path, attached: bool) -> None:
    config = Config(attach=f"unix:{tmp_path}/nobody")
    with pytest.raises(ControlError, match="attach_listen"):
        member_beside(config)
    with pytest.raises(ControlError, match="attach_listen"):
        EngineNodes.start(config, Node.start, has_pages=True)


def test_the_first_node_ends_where_the_second_one_can_not_start(hosts_node: Node, attached: bool) -> None:
    started: list[Node] = []

    def start(config: Config) -> Node:
        started.append(Node.start(config))
        return started[-1]

    config = Config(attach=hosts_node.config.attach_listen, node_id="host")  # which a live member has
    with pytest.raises(DuplicateNodeError):
        EngineNodes.start(config, start, has_pages=True)
    assert [node.is_closed for node in started] == [True]


def test_a_member_listens_where_other_hosts_reach_it_if_they_reach_the_hosts_node_unless_listen_was_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "secret").write_text("x" * 64)
    (tmp_path / "secret").chmod(0o600)
    attaching = Config(attach="unix:/x", secret_file=str(tmp_path / "secret"))
    for node, listens, member in (
        ("10.0.0.5:7400", "127.0.0.1:0", "10.0.0.5:0"),
        ("10.0.0.5:7400", "127.0.0.1:7500", "127.0.0.1:7500"),
        ("10.0.0.5:7400", "10.0.0.6:0", "10.0.0.6:0"),
        ("[fd00::1]:7400", "127.0.0.1:0", "[fd00::1]:0"),
        ("127.0.0.1:7400", "127.0.0.1:0", "127.0.0.1:0"),
    ):
        monkeypatch.setattr(nodes, "_node_at", lambda path, node=node: (node, "p2pkv"))
        config = member_beside(dataclasses.replace(attaching, listen=listens))
        assert (config.join_addresses, config.listen) == ((node,), member)
    assert caplog.text.count("listen is 127.0.0.1:7500, where members of other hosts don't reach") == 1
    monkeypatch.setattr(nodes, "_node_at", lambda path: ("10.0.0.5:7400", "p2pkv"))
    with pytest.raises(ConfigError, match="secret_file"):
        member_beside(Config(attach="unix:/x"))
