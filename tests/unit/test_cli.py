"""The command line: what works prints, what doesn't is one clear line on stderr and exit status 1."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import demo
import p2pkv
from cluster import eventually
from p2pkv import Config, Node, page_key
from p2pkv.cli import app
from p2pkv.cli.demo import _folder
from p2pkv.cli.outsider import Outsider
from p2pkv.cli.prefix_index import DEFAULT_ADDRESS, without_pages
from p2pkv.config import MIN_POOL_SIZE
from p2pkv.directory.view import Report, State

COMMAND = (sys.executable, "-c", "from p2pkv.cli import main; main()")


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=_environ(**environ),
        check=False,
    )


def _environ(**more: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1", "HOME": "/nonexistent"} | more


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return _secret(tmp_path / "secret", "an example of a secret")


def _secret(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


def _assert_is_one_clear_line(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("p2pkv: ")


@contextmanager
def _node_command(*arguments: str, command: str = "node") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environ(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_it_knows_its_version() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout[:6]) == (0, "p2pkv ")


def test_it_runs_as_a_module_and_helps_for_short() -> None:
    command = (sys.executable, "-m", "p2pkv")
    result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    assert result.stdout == f"p2pkv {p2pkv.__version__}\n"
    assert run("-h").stdout == run("--help").stdout
    assert "--log-level" in run("node", "-h").stdout


def test_a_nodes_log_has_times_and_as_little_as_is_wished(secret: str) -> None:
    for level, says in (("info", True), ("error", False)):
        with _node_command("--set", f"secret_file={secret}", "--log-level", level) as node:
            assert node.stdout is not None
            assert node.stderr is not None
            assert "listens on" in node.stdout.readline()
            node.send_signal(signal.SIGTERM)
            lines = node.stderr.read().splitlines()
        assert bool(lines) is says, lines
        assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (INFO|WARNING) ", line) for line in lines)


def test_a_prefix_index_has_no_room_for_pages_whatever_a_shared_configuration_says(tmp_path: Path) -> None:
    disk = {"disk_path": str(tmp_path), "disk_size": "1GiB"}
    config = without_pages(Config(node_id="n", pool_size="1GiB", indexer="127.0.0.1:9", **disk))
    assert (config.pool_nbytes, config.disk_path, config.indexer) == (MIN_POOL_SIZE, None, "127.0.0.1:9")
    assert without_pages(Config()).indexer == DEFAULT_ADDRESS


def test_a_prefix_index_answers_for_the_cluster(secret: str) -> None:
    keys = ["first", "second"]
    rows = np.ones((len(keys), 4096), np.uint8)
    with (
        Node.start(Config(node_id="owner", secret_file=secret, pool_size="4MiB")) as owner,
        _node_command(
            *("--join", owner.address, "--set", f"secret_file={secret}", "--set", "indexer=127.0.0.1:0"),
            *("--set", "node_id=index"),
            command="prefix-index",
        ) as index,
    ):
        assert index.stdout is not None
        port = int(index.stdout.readline().rpartition("indexer on port ")[2])
        owner.register_memory(rows)
        assert owner.publish(keys, rows).all()
        hashes = [page_key("default", key, owner.epoch).hex() for key in [*keys, "never published"]]
        asked = json.dumps({"model": "m", "block_size": 16, "seq_hashes": hashes}).encode()

        def held() -> object:
            url = f"http://127.0.0.1:{port}/query_by_hash"
            with urllib.request.urlopen(url, asked, timeout=10) as answer:
                told = json.load(answer)["default"]
            return {name: (each["CPU"], each["EXTERNAL"]) for name, each in told.items()}

        eventually(lambda: held() == {"index": (0, 32), "owner": (32, 32)}, 10.0)


def test_a_prefix_index_that_others_reach_needs_a_token(secret: str) -> None:
    result = run("prefix-index", "--set", f"secret_file={secret}", "--set", "indexer=0.0.0.0:0")
    _assert_is_one_clear_line(result)
    assert "indexer_token" in result.stderr


def test_an_unknown_setting_is_refused_with_the_nearest_name() -> None:
    result = run("doctor", "--set", "pool_sise=1GiB")
    _assert_is_one_clear_line(result)
    assert "did you mean 'pool_size'?" in result.stderr


def test_doctor_finds_a_node_can_run_here(secret: str) -> None:
    result = run("doctor", "--set", f"secret_file={secret}")
    assert result.returncode == 0, result.stdout
    for subject in ("transport shm", "transport tcp", "CURVE", "secret", "memory", "cores"):
        assert subject in result.stdout


def test_doctor_says_what_to_do_about_a_secret_that_others_can_read(secret: str) -> None:
    Path(secret).chmod(0o644)
    result = run("doctor", P2PKV_SECRET_FILE=secret)
    assert result.returncode == 1
    assert f"chmod 600 {secret}" in result.stdout


def test_doctor_without_a_secret_makes_none(tmp_path: Path) -> None:
    result = run("doctor", XDG_STATE_HOME=str(tmp_path))
    assert result.returncode == 0, result.stdout
    assert list(tmp_path.iterdir()) == []


def test_settings_come_from_options_then_the_file_then_the_environment(tmp_path: Path, secret: str) -> None:
    file = tmp_path / "node.json"
    file.write_text(json.dumps({"transports": "shm,tcp", "secret_file": secret}))
    result = run("doctor", "--config", str(file), "--set", "transports=tcp", P2PKV_TRANSPORTS="local")
    assert "a node uses tcp" in result.stdout


def test_status_shows_the_members_of_a_cluster_without_joining_it(secret: str) -> None:
    with Node.start(Config(node_id="alone", secret_file=secret, pool_size="1MiB")) as node:
        result = run("status", "--join", node.address, "--set", f"secret_file={secret}", "--json")
        assert result.returncode == 0, result.stderr
        (member,) = json.loads(result.stdout)["members"]
        assert (member["node_id"], member["state"], member["address"]) == ("alone", "ALIVE", node.address)
        assert set(member["transports"]) >= {"tcp"}
        table = run("status", "--join", node.address, "--set", f"secret_file={secret}")
        assert "alone" in table.stdout
        assert [member.node_id for member in node.members()] == ["alone"]


def test_status_checks_that_no_member_is_missing(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members = Outsider.members

    def with_one_dead(self: Outsider, addresses: list[str], timeout: float) -> tuple[Report, str]:
        report, address = members(self, addresses, timeout)
        dead = replace(report.members[0], node_id="m", state=State.DEAD)
        return replace(report, members=(*report.members, dead)), address

    with Node.start(Config(node_id="n", secret_file=secret, pool_size="1MiB")) as node:
        command = ["status", "--join", node.address, "--set", f"secret_file={secret}"]
        assert CliRunner().invoke(app, [*command, "--check"]).exit_code == 0
        monkeypatch.setattr(Outsider, "members", with_one_dead)
        missing = CliRunner().invoke(app, [*command, "--check", "--json"])
        assert (missing.exit_code, "DEAD" in missing.stdout) == (1, True)
        assert CliRunner().invoke(app, command).exit_code == 0


def test_status_hints_at_a_wrong_secret(secret: str, tmp_path: Path) -> None:
    other = _secret(tmp_path / "other", "the secret of another cluster")
    with Node.start(Config(node_id="alone", secret_file=secret, pool_size="1MiB")) as node:
        result = run("status", "--join", node.address, "--set", f"secret_file={other}", "--timeout", "0.5")
    _assert_is_one_clear_line(result)
    assert "is secret_file the cluster's?" in result.stderr


def test_status_says_when_nobody_is_there(secret: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        result = run("status", "--join", address, "--set", f"secret_file={secret}", "--timeout", "0.3")
    _assert_is_one_clear_line(result)
    assert "is a node running there?" in result.stderr


def test_status_needs_an_address(secret: str) -> None:
    result = run("status", P2PKV_SECRET_FILE=secret)
    _assert_is_one_clear_line(result)
    assert "--join" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_says_who_comes_and_goes_and_leaves_when_told(secret: str, number: signal.Signals) -> None:
    options = ("--set", f"secret_file={secret}", "--set", "pool_size=1MiB", "--set", "node_id=first")
    with _node_command(*options) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[4].rstrip(",")
        with Node.start(
            Config(node_id="second", secret_file=secret, pool_size="1MiB", join=[address])
        ) as node:
            assert process.stdout.readline().startswith("+ second at ")
            process.send_signal(number)
            output, _ = process.communicate(timeout=200)
            assert process.returncode == 0
            assert output.endswith("node first left its cluster\n")
            eventually(lambda: [member.node_id for member in node.members()] == ["second"], 5.0)


def test_a_node_goes_on_where_nobody_takes_what_it_says(secret: str) -> None:
    options = ("--set", f"secret_file={secret}", "--set", "pool_size=1MiB", "--set", "node_id=first")
    with _node_command(*options) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().split()[4].rstrip(",")
        process.stdout.close()  # as of a reader at the other end of a pipe that ends
        with Node.start(
            Config(node_id="second", secret_file=secret, pool_size="1MiB", join=[address])
        ) as node:
            said = iter(process.stderr.readline, "")
            assert any("stdout can't be written: Broken pipe" in line for line in said)
            eventually(lambda: len(node.members()) == 2, 20.0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=200) == 0
            assert "stdout" not in process.stderr.read()


@pytest.mark.parametrize("command", ["node", "keeper"])
def test_a_full_disk_that_takes_what_is_said_ends_nobody(secret: str, tmp_path: Path, command: str) -> None:
    given = [f"unix:{tmp_path}/keeper/s"] if command == "keeper" else ["--set", f"secret_file={secret}"]
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            [*COMMAND, command, *given], stdout=full, stderr=subprocess.PIPE, text=True, env=_environ()
        )
    try:
        assert process.stderr is not None
        said = iter(process.stderr.readline, "")
        line = next(line for line in said if "stdout can't be written: No space left on device" in line)
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ WARNING ", line), "a log has times"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("arguments", [["--quick"], ["--help"], ["serving", "--overhead"]])
def test_without_its_package_the_benchmark_says_what_to_install(arguments: list[str]) -> None:
    code = "import sys; sys.modules['p2pkv_bench'] = None; from p2pkv.cli import main; main()"
    command = [sys.executable, "-c", code, "bench", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    _assert_is_one_clear_line(result)
    assert "pip install p2pkv-bench" in result.stderr


def test_the_demo_is_that_of_the_checkout_or_what_was_installed_beside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _folder(Path(p2pkv.__file__).parents[1]) == Path(demo.__file__).parents[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("p2pkv.cli.demo._ROOT", tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/__init__.py").touch()  # some other package of that name
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "make demo" in result.output
    installed = tmp_path / "p2pkv_demo"
    (installed / "demo").mkdir(parents=True)
    for name in ("__init__.py", "paged_kv.py"):
        (installed / "demo" / name).touch()
    (installed / "demo/__main__.py").write_text("import os, sys; sys.exit(len(sys.argv) + len(os.listdir()))")
    result = CliRunner().invoke(app, ["demo", "a prompt"])
    assert result.exit_code == 3, "two arguments, and one folder where it runs"


def test_a_drain_is_not_waited_for_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv.cli.outsider._MEET_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = "{}:{}".format(*mute.getsockname())
        began = time.monotonic()
        result = CliRunner().invoke(app, ["drain", "n", "--join", address, "--timeout", "60"])
    assert "no node answered within 0.2 s" in str(result.exception)
    assert time.monotonic() - began < 30.0
