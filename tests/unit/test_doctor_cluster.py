"""The doctor says beforehand what a node would meet: its addresses, its cluster, its memory."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cli import run

from p2pkv import Config, Node
from p2pkv.cli.doctor.cluster import examine_cluster
from p2pkv.cli.doctor.finding import Finding, Verdict
from p2pkv.cli.doctor.memory import examine_memory
from p2pkv.errors import ConfigError
from p2pkv.state_home import state_home
from p2pkv.testing.ports import free_port

MIB = 1 << 20


def _secret(path: Path) -> str:
    path.touch(mode=0o600)
    path.write_text(f"the secret {path.name} of this test")
    return str(path)


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return _secret(tmp_path / "ours")


@pytest.fixture
def node(secret: str) -> Iterator[Node]:
    with Node.start(Config(node_id="there", secret_file=secret, pool_size="1MiB", buffer_size=0)) as node:
        yield node


def _of(config: Config, what: str) -> Finding:
    return next(finding for finding in examine_cluster(config) if finding.what.startswith(what))


def test_a_node_that_answers_is_found_as_a_member_finds_it(node: Node, secret: str) -> None:
    finding = _of(Config(secret_file=secret, join=node.address), "join")
    assert finding.verdict is Verdict.GOOD
    assert "there answers" in finding.says


def test_a_wrong_secret_is_bad(node: Node, tmp_path: Path) -> None:
    finding = _of(Config(secret_file=_secret(tmp_path / "theirs"), join=node.address), "join")
    assert finding.verdict is Verdict.BAD
    assert "does not let us in; is secret_file the cluster's?" in finding.says


def test_another_clusters_name_and_a_taken_node_id_are_bad(node: Node, secret: str) -> None:
    other = _of(Config(secret_file=secret, join=node.address, cluster="other"), "join")
    assert (other.verdict, other.advice) == (Verdict.BAD, "set cluster")
    twin = _of(Config(secret_file=secret, join=node.address, node_id="there"), "join")
    assert twin.verdict is Verdict.BAD
    assert "choose another node_id" in twin.advice


def test_an_address_where_nobody_is_does_for_the_first_node_of_its_host(secret: str) -> None:
    finding = _of(Config(secret_file=secret, join=f"127.0.0.1:{free_port()}"), "join")
    assert finding.verdict is Verdict.GOOD
    assert "would take this address" in finding.says


def test_silence_is_bad_only_where_nobody_else_answers(node: Node, secret: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = f"127.0.0.1:{mute.getsockname()[1]}"
        alone = _of(Config(secret_file=secret, join=silent), "join")
        assert alone.verdict is Verdict.BAD
        assert "would be alone" in alone.advice
        assert (
            _of(Config(secret_file=secret, join=[silent, node.address]), f"join {silent}").verdict
            is Verdict.NOTE
        )


@pytest.mark.parametrize(
    ("listen", "says"),
    [("192.0.2.1:0", "Cannot assign requested address"), ("0.0.0.0:0", "no join address tells")],
)
def test_an_address_that_a_node_could_not_have_is_bad(secret: str, listen: str, says: str) -> None:
    finding = _of(Config(secret_file=secret, listen=listen), "listen")
    assert finding.verdict is Verdict.BAD
    assert says in finding.says


def test_a_port_in_use_is_bad(node: Node, secret: str) -> None:
    finding = _of(Config(secret_file=secret, listen=node.address), "listen")
    assert finding.verdict is Verdict.BAD
    assert "Address already in use" in finding.says
    _, _, port = node.address.rpartition(":")
    assert _of(Config(secret_file=secret, metrics_port=int(port)), "metrics").verdict is Verdict.BAD
    indexer = _of(Config(secret_file=secret, indexer=node.address), "indexer")
    assert (indexer.verdict, indexer.says) == (Verdict.BAD, f"{node.address}: Address already in use")
    assert _of(Config(secret_file=secret, indexer="127.0.0.1:0"), "indexer").verdict is Verdict.GOOD


def test_the_node_of_these_settings_that_runs_already_is_no_fault(secret: str) -> None:
    """Alerts send operators to the doctor while the node runs, and so does an upgrade."""
    settings: dict[str, object] = {
        "node_id": "ours",
        "secret_file": secret,
        "listen": f"127.0.0.1:{free_port()}",
        "metrics_port": free_port(),
        "pool_size": "1MiB",
    }
    first = free_port()
    settings["data_ports"] = f"{first}-{first + 2}"
    config = Config.load({**settings, "join": settings["listen"]}, environ={})
    with Node.start(config):
        found = list(examine_cluster(config))
        says = {finding.what: finding.says for finding in found}
        assert says["listen"] == f"{config.listen}: node 'ours' runs there already"
        assert "answers there itself, and knows no other" in says[f"join {config.listen}"]
        assert [finding.what for finding in found if finding.verdict is Verdict.BAD] == []
        other = dataclasses.replace(config, node_id="other")
        listen = _of(other, "listen")
        assert (listen.verdict, "a node here takes a free port" in listen.says) == (Verdict.NOTE, True)
        assert _of(other, "metrics").verdict is Verdict.BAD
        with socket.create_server(("127.0.0.1", 0)) as mute:
            silent = f"127.0.0.1:{mute.getsockname()[1]}"
            apart = _of(dataclasses.replace(config, join=(config.listen, silent)), f"join {silent}")
            assert apart.verdict is Verdict.BAD, "it is alone, whoever answers for itself"


def test_the_command_fails_where_a_node_would_be_alone(node: Node, tmp_path: Path) -> None:
    theirs = _secret(tmp_path / "theirs")
    result = run("doctor", "--set", f"join={node.address}", "--set", f"secret_file={theirs}")
    assert result.returncode == 1
    assert "does not let us in" in result.stdout


def test_a_state_folder_that_cannot_be_made_is_bad() -> None:
    result = run("doctor", XDG_STATE_HOME="/proc/none")
    assert result.returncode == 1
    assert "a private one can't be made at /proc/none/p2pkv/secret" in result.stdout


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(ConfigError, match=r"no home directory .* set secret_file, or XDG_STATE_HOME"):
        state_home("secret_file")


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_all_memory_that_a_node_takes_counts(tmp_path: Path) -> None:
    _write(tmp_path, {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {1024 * 1024} kB\n"})
    fits = Config(
        pool_size="500MiB", buffer_size="100MiB", buddy_pool_size="300MiB", device_staging_size="64MiB"
    )
    assert examine_memory(fits, tmp_path).verdict is Verdict.GOOD
    too_much = Config(pool_size="500MiB", buffer_size="100MiB", buddy_pool_size="700MiB")
    finding = examine_memory(too_much, tmp_path)
    assert finding.verdict is Verdict.BAD
    assert "lower buddy_pool_size" in finding.advice


def test_addresses_of_kv_events_are_bound_as_a_node_would(secret: str) -> None:
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))

    def look(replay: str) -> Finding:
        return _of(Config(secret_file=secret, kv_events=events, kv_events_replay=replay), "kv_events")

    assert look(replay).verdict is Verdict.GOOD
    assert look("").verdict is Verdict.NOTE
    twice = look(events)
    assert twice.verdict is Verdict.BAD
    assert "cannot listen on kv_events_replay" in twice.says
    taken = Config(
        node_id="there", secret_file=secret, pool_size="1MiB", kv_events=events, kv_events_replay=replay
    )
    with Node.start(taken):
        assert "cannot listen on kv_events '" in look(replay).says
    assert look(replay).verdict is Verdict.GOOD
