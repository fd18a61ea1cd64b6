"""``auto``: nodes and engines of a user that meet without a path, and what becomes of an engine that finds nobody."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pkv import Config, Node
from p2pkv.attach import auto
from p2pkv.errors import ConfigError
from p2pkv.integrations.nodes import EngineNodes, member_beside
from p2pkv.integrations.sglang.pd.settings import pd_config
from p2pkv.testing.lateness import returns_within
from p2pkv.testing.ports import free_port
from tenancy import Secrets
from tenancy import settings as tenant_settings

WELCOME = struct.Struct("=IHHQQQ264s136s")
MAGIC = 0x57413250
BY_ITSELF = "this process is a node by itself, for as long as it lives"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """Where nodes listen; it is there once one does."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(auto, "_SERVICES", tmp_path / "services")
    # Silence is the point of few tests; for all others a node that waits for a processor answers in time.
    monkeypatch.setattr(auto, "_VISIT_S", 20.0)
    monkeypatch.setattr(auto, "_SECRET_S", 20.0)
    monkeypatch.setattr(auto, "_DECIDE_S", 60.0)
    caplog.set_level(logging.INFO, "p2pkv.attach.auto")
    return tmp_path / "run/p2pkv"


@pytest.fixture
def secret(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path)


@contextmanager
def host(**settings: Any) -> Iterator[Node]:
    known: dict[str, Any] = {"node_id": "host", "pool_size": "1MiB", "attach_listen": "auto"}
    with Node.start(Config(**(known | settings))) as node:
        yield node


@contextmanager
def engine(**settings: Any) -> Iterator[Node]:
    known: dict[str, Any] = {"node_id": "engine", "pool_size": "1MiB", "attach": "auto"}
    with Node.start(Config(**(known | settings))) as node:
        yield node


def is_attached(node: Node) -> bool:
    return bool(node.config.attach) and node.counters()["p2pkv_attached"] == 1


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name == "p2pkv.attach.auto"
    ]


def test_an_engine_attaches_to_the_node_of_its_host(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with host() as node, engine() as one:
        assert is_attached(one)
        assert one.config.attach == node.config.attach_listen
        assert Path(node.config.attach_listen_path).parent == folder
        assert folder.stat().st_mode & 0o777 == 0o700
        page = np.ones((1, 4096), np.uint8)
        with one.register_memory(page):
            assert one.publish(["a"], page, timeout=20.0).all()
        assert node.exists(["a"], timeout=20.0).all()
        assert told(caplog) == [
            ("INFO", f"attach is 'auto': this process attaches to the node at {one.config.attach}")
        ]
        assert node.counters()["p2pkv_attach_refused_total"] == 0
    assert list(folder.iterdir()) == []


def test_who_finds_nobody_is_a_node_and_stays_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine() as one:
        assert one.config.attach == ""
        ((level, message),) = told(caplog)
        assert level == "INFO"
        assert BY_ITSELF in message
        assert f"no node of this user listens in {folder}" in message
        with host(listen="127.0.0.1:0"):
            page = np.ones((1, 4096), np.uint8)
            with one.register_memory(page):
                assert one.publish(["a"], page, timeout=20.0).all()
            assert one.counters()["p2pkv_pool_pages"] == 1
        assert one.members()[0].node_id == "engine"


def test_a_socket_that_a_killed_node_has_left_is_nobody(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(folder / "host"))
    with engine() as one:
        assert one.config.attach == ""
    assert [level for level, _ in told(caplog)] == ["INFO"]


def test_an_engine_that_is_attached_stays_so_when_its_node_goes() -> None:
    with ExitStack() as undo:
        with host():
            one = undo.enter_context(engine())
        page = np.ones((1, 4096), np.uint8)
        with one.register_memory(page):
            assert not one.publish(["a"], page, timeout=1.0).any()
        assert one.config.attach
        with host():
            until = time.monotonic() + 20
            while not is_attached(one) and time.monotonic() < until:
                time.sleep(0.02)
            assert is_attached(one)


def test_a_node_at_the_path_of_the_manifests_is_found(tmp_path: Path, secret: Secrets) -> None:
    services = tmp_path / "services"
    services.mkdir(mode=0o700)
    given = {"secret_file": secret("cluster")}
    with host(attach_listen=f"unix:{services}/host", **given), engine(**given) as one:
        assert is_attached(one)
        assert one.config.attach_path == f"{services}/host"


def test_nodes_of_several_secrets_are_in_nobodys_way(secret: Secrets) -> None:
    with ExitStack() as undo:
        hosts = [
            undo.enter_context(host(node_id=f"host-{name}", secret_file=secret(name))) for name in ("a", "b")
        ]
        for node, name in zip(hosts, ("a", "b"), strict=True):
            assert undo.enter_context(engine(secret_file=secret(name))).owner_id == node.node_id
        rotated = undo.enter_context(engine(secret_file=secret("c"), accepted_secret_files=[secret("a")]))
        assert rotated.owner_id == "host-a"
        with pytest.raises(ConfigError, match="another node listens there"):
            undo.enter_context(host(node_id="third", secret_file=secret("a")))


def test_an_engine_of_a_tenant_finds_the_tenants_node(secret: Secrets) -> None:
    settings = tenant_settings(secret, "acme", "zen", node_id="host", attach_listen="auto")
    for name in ("acme", "zen"):
        settings["tenants"][name]["attach_listen"] = "auto"
    with Node.start(Config(**settings)) as node:
        for name in ("acme", "zen"):
            with engine(secret_file=secret(name), namespace=name) as one:
                assert one.config.attach == node.tenant(name).config.attach_listen
                page = np.ones((1, 4096), np.uint8)
                with one.register_memory(page):
                    assert one.publish(["a"], page, timeout=20.0).all()
                assert node.tenant(name).counters()["p2pkv_pool_pages"] == 1


def test_a_node_of_another_secret_or_cluster_says_so_and_the_engine_is_a_node(
    folder: Path, secret: Secrets, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    with host(attach_listen=f"unix:{folder}/host", secret_file=secret("a"), cluster="blue"):
        with engine(secret_file=secret("a"), cluster="green") as one:
            assert one.config.attach == ""
        with monkeypatch.context() as hasty:
            hasty.setattr(auto, "_SECRET_S", 0.5)
            with engine(secret_file=secret("b")) as one:
                assert one.config.attach == ""
        with engine(secret_file=secret("a")) as one:  # as one that is told the path
            assert is_attached(one)
    (of_cluster, of_secret, _) = told(caplog)
    for level, message in (of_cluster, of_secret):
        assert level == "WARNING"
        assert f"{BY_ITSELF}: {folder}/host: " in message
    assert "the node there is of cluster 'blue', and this process of 'green'" in of_cluster[1]
    assert "does not answer who has this secret; it has another secret_file, or hangs" in of_secret[1]


@contextmanager
def answering(path: Path, packet: bytes | None) -> Iterator[None]:
    """Be one who lets nobody in: he answers with a packet, or nothing at all; who looks for him again gets no more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(path))
        server.listen(8)

        def answer() -> None:
            if packet is not None:
                with server.accept()[0] as connection:
                    connection.recv(4096)
                    connection.send(packet)

        thread = threading.Thread(target=answer)
        thread.start()
        yield
        thread.join(30.0)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("packet", "said"),
    [
        (WELCOME.pack(MAGIC, 99, 1, 0, 0, 0, b"", b""), "speaks version 99 of attaching"),
        (b"SSH-2.0-OpenSSH_9.6", "no node of p2pkv"),
        (None, "the node there does not answer; is it stopped?"),
    ],
)
def test_who_does_not_let_it_in_is_named_in_time_and_the_engine_is_a_node(
    folder: Path,
    packet: bytes | None,
    said: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "_DECIDE_S", 1.0 if packet is None else 20.0)
    folder.mkdir(mode=0o700)
    with answering(folder / "host", packet), returns_within(10.0):
        decided = auto.decided(Config(attach="auto"))
    assert decided.attach == ""
    ((level, message),) = told(caplog)
    assert (level, said in message) == ("WARNING", True), message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    assert auto.decided(Config(attach="auto")).attach == ""
    ((level, message),) = told(caplog)
    assert level == "WARNING"
    assert (
        f"{folder} is a folder of user 65534, and this is user 0; run the node and its engines as" in message
    )


def test_a_node_without_a_folder_to_listen_in_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(auto, "_SERVICES", tmp_path / "none/services")
    monkeypatch.setattr(auto, "_USERS", tmp_path / "none/users")
    with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR to a folder of this user's, or attach_listen"):
        auto.decided(Config(node_id="host", attach_listen="auto"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert auto.decided(Config(attach="auto")).attach == ""


def test_settings_of_the_hosts_node_are_refused_before_anybody_is_looked_for() -> None:
    for setting in (
        {"attach_listen": "auto"},
        {"disk_size": "1GiB", "node_id": "n"},
        {"indexer": "127.0.0.1:0"},
    ):
        with pytest.raises(ConfigError, match="attach is set, so"):
            Config(attach="auto", **setting)
    with pytest.raises(ConfigError, match="attach must be auto, or unix: and an absolute path"):
        Config(attach="automatic")
    config = Config(attach="unix:/run/p2pkv/host")
    assert auto.decided(config) is config


def test_what_an_engine_needs_beside_it_follows_what_was_found(tmp_path: Path) -> None:
    config = Config(node_id="engine", pool_size="1MiB", attach="auto")
    alone = EngineNodes.start(config, Node.start, has_pages=True)
    assert alone.each == (alone.member,)
    alone.close()
    environ = {"P2PKV_ATTACH": "auto", "P2PKV_JOIN": f"127.0.0.1:{free_port()}"}
    assert pd_config("127.0.0.1", 1, index=0, environ=environ).attach == ""
    with host() as node:
        assert member_beside(config).join_addresses == (node.address,)
        both = EngineNodes.start(config, Node.start, has_pages=True)
        try:
            assert [each.node_id for each in both.each] == ["engine", "engine-pages"]
            assert is_attached(both.cache)
            assert {member.node_id for member in both.member.members()} == {"host", "engine"}
        finally:
            both.close()
        environ = {"P2PKV_ATTACH": "auto"}
        assert pd_config("127.0.0.1", 1, index=0, environ=environ).join_addresses == (node.address,)
