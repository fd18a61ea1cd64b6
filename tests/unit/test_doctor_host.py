"""The doctor says beforehand what an engine that attaches would meet, and a node with engines, a keeper and tenants."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from p2pkv import Config, Node
from p2pkv.cli.doctor import examine
from p2pkv.cli.doctor.cluster import examine_cluster
from p2pkv.cli.doctor.finding import Finding, Verdict
from p2pkv.cli.doctor.host import examine_host
from p2pkv.keeper.server import KeeperServer
from p2pkv.testing.ports import free_port


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where ``auto`` looks, instead of the user's own."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def _secret(path: Path) -> str:
    path.touch(mode=0o600)
    path.write_text(f"the secret {path.name} of this test")
    return str(path)


def _found(**settings: object) -> Finding:
    (finding,) = examine_host(Config.load(settings, environ={}))
    return finding


def test_a_node_by_itself_is_asked_nothing_of_it() -> None:
    assert list(examine_host(Config())) == []


def test_an_engine_is_told_whether_its_node_lets_it_in(tmp_path: Path) -> None:
    path, secret = f"unix:{tmp_path}/host/s", _secret(tmp_path / "ours")
    missing = _found(attach=path, secret_file=secret)
    assert missing.verdict is Verdict.BAD
    assert missing.says == f"{path}: no node listens there"
    assert "p2pkv node with attach_listen" in missing.advice
    with Node.start(Config(node_id="host", pool_size="1MiB", attach_listen=path, secret_file=secret)):
        assert _found(attach=path, secret_file=secret).verdict is Verdict.GOOD
        stranger = _found(attach=path, secret_file=_secret(tmp_path / "theirs"))
        assert stranger.verdict is Verdict.BAD
        assert "it has another secret_file, or hangs" in stranger.says
        other = _found(attach=path, secret_file=secret, cluster="prod")
        assert other.verdict is Verdict.BAD
        assert "of cluster 'p2pkv', and this process of 'prod'" in other.says


def test_an_engine_that_looks_for_a_node_is_told_what_it_would_be(tmp_path: Path) -> None:
    secret = _secret(tmp_path / "ours")
    alone = _found(attach="auto", secret_file=secret)
    assert alone.verdict is Verdict.NOTE
    assert "a node by itself, since no node of this user listens in" in alone.says
    with Node.start(Config(node_id="host", pool_size="1MiB", attach_listen="auto", secret_file=secret)):
        there = _found(attach="auto", secret_file=secret)
        assert there.verdict is Verdict.GOOD
        assert "auto: attaches to the node at unix:" in there.says


def test_a_node_is_told_whether_it_can_listen_for_engines(tmp_path: Path) -> None:
    path = tmp_path / "host" / "s"
    assert _found(attach_listen=f"unix:{path}").verdict is Verdict.GOOD
    assert not path.parent.exists(), "the doctor leaves nothing"
    with Node.start(Config(node_id="host", pool_size="1MiB", attach_listen=f"unix:{path}")):
        taken = _found(attach_listen=f"unix:{path}")
        assert taken.verdict is Verdict.NOTE
        assert "listens there" in taken.says
    os.chmod(path.parent, 0o755)
    opened = _found(attach_listen=f"unix:{path}")
    assert opened.verdict is Verdict.BAD
    assert "has to be this user's, with mode 0700" in opened.says


def test_a_node_is_told_whether_its_keeper_answers(tmp_path: Path) -> None:
    keeper = f"unix:{tmp_path}/keeper/s"
    missing = _found(keeper=keeper, node_id="n")
    assert missing.verdict is Verdict.BAD
    assert f"start one with p2pkv keeper {keeper}" in missing.says
    server = KeeperServer(keeper.removeprefix("unix:"))
    assert _found(keeper=keeper, node_id="n").verdict is Verdict.GOOD
    server.close()
    assert _found(keeper="systemd", node_id="n").verdict is Verdict.NOTE


def test_a_node_is_told_what_its_tenants_lack(tmp_path: Path) -> None:
    ours, acme = _secret(tmp_path / "ours"), _secret(tmp_path / "acme")
    shared = _found(secret_file=ours, tenants={"acme": {"secret_file": ours}})
    assert shared.verdict is Verdict.BAD
    assert "is also that of the cluster" in shared.says
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    tenants = {"acme": {"secret_file": acme, "pool_size": "1GiB", "attach_listen": f"unix:{folder}/acme"}}
    config = Config.load({"secret_file": ours, "tenants": tenants}, environ={})
    whole, path = examine_host(config)
    assert (whole.verdict, whole.says) == (
        Verdict.GOOD,
        "acme: each has a secret, and pools of 1.0 GiB together",
    )
    assert (path.verdict, path.what) == (Verdict.BAD, "attach_listen of acme")


def test_what_is_a_tenants_own_is_tried_out_as_the_nodes_is(tmp_path: Path) -> None:
    ours, acme = _secret(tmp_path / "ours"), _secret(tmp_path / "acme")
    theirs = tmp_path / "theirs"
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        Node.start(
            Config(
                node_id="other", pool_size="1MiB", disk_size="8MiB", disk_path=str(theirs), secret_file=ours
            )
        ),
    ):
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        tenant: dict[str, object] = {"secret_file": acme, "listen": address, "disk_path": str(theirs)}
        tenant |= {"metrics_port": taken.getsockname()[1], "disk_size": "8MiB"}
        config = Config.load({"node_id": "n", "secret_file": ours, "tenants": {"acme": tenant}}, environ={})
        found = {finding.what: finding for finding in examine_host(config)}
    assert found.keys() == {"tenants", "listen of acme", "metrics of acme", "disk tier of acme"}
    assert "Address already in use" in found["listen of acme"].says
    assert "Address already in use" in found["metrics of acme"].says
    assert "is the store of cluster" in found["disk tier of acme"].says
    bad = {what for what, finding in found.items() if finding.verdict is Verdict.BAD}
    assert bad == found.keys() - {"tenants"}


def test_tenants_need_data_ports_of_their_own(tmp_path: Path) -> None:
    first = free_port()
    config = Config(data_ports=f"{first}-{first + 3}", tenants={"acme": {"secret_file": "/nowhere"}})
    ports = next(finding for finding in examine_cluster(config) if finding.what == "data_ports")
    assert ports.verdict is Verdict.BAD
    assert ports.advice == "a node with 1 tenants needs 6; widen data_ports"


def test_all_that_the_doctor_says_has_it(tmp_path: Path) -> None:
    config = Config(attach=f"unix:{tmp_path}/nowhere", pool_size="1MiB")
    assert "attach" in {finding.what for finding in examine(config) if finding.verdict is Verdict.BAD}
