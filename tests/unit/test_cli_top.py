"""``p2pkv top``: counters of every node, asked from outside."""

from __future__ import annotations

import json
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from test_cli import COMMAND, _environ
from typer.testing import CliRunner

from p2pkv import Config, Node
from p2pkv.cli import app, top
from p2pkv.cli.outsider import Outsider
from p2pkv.control.counters import decode_counters
from p2pkv.control.secret import cluster_keys
from p2pkv.directory.view import State
from p2pkv.errors import ControlError


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("an example of a secret")
    return str(path)


def test_each_reading_has_what_every_node_counted_until_then(secret: str) -> None:
    with Node.start(Config(node_id="alone", secret_file=secret, pool_size="1MiB")) as node:
        options = ("--join", node.address, "--set", f"secret_file={secret}", "--every", "0.1", "--jsonl")
        process = subprocess.Popen(
            [*COMMAND, "top", *options], stdout=subprocess.PIPE, text=True, env=_environ()
        )
        try:
            assert process.stdout is not None
            before = json.loads(process.stdout.readline())
            pages = np.zeros((3, 4096), np.uint8)
            node.register_memory(pages)
            node.publish(["a", "b", "c"], pages)
            for line in process.stdout:  # ends when they show, or with the test's patience
                (record,) = json.loads(line)["nodes"]
                if record["counters"]["p2pkv_published_pages_total"] == 3:
                    break
        finally:
            process.kill()
            process.communicate()
        assert before["asked"] == node.address
        assert before["nodes"][0]["counters"]["p2pkv_published_pages_total"] == 0
        assert record["counters"]["p2pkv_pool_pages"] == 3
        assert [member.node_id for member in node.members()] == ["alone"], "it joined"


def test_a_reading_is_a_table_with_a_line_for_each_node(secret: str) -> None:
    config = Config(node_id="first", secret_file=secret, pool_size="1MiB")
    with (
        Node.start(config) as first,
        Node.start(replace(config, node_id="second", join=[first.address])) as second,
    ):
        arguments = ["top", "--join", second.address, "--set", f"secret_file={secret}", "--count", "1"]
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "2 nodes" in result.output
    assert "first" in result.output
    assert "second" in result.output
    assert "0% of 1.0 MiB" in result.output


def test_json_is_one_document_with_as_many_readings_as_are_asked_for(secret: str) -> None:
    with Node.start(Config(node_id="alone", secret_file=secret, pool_size="1MiB")) as node:
        options = ["--join", node.address, "--set", f"secret_file={secret}", "--json"]
        one = CliRunner().invoke(app, ["top", *options])
        two = CliRunner().invoke(app, ["top", *options, "--count", "2", "--every", "0.1"])
        status = CliRunner().invoke(app, ["status", *options[:-1], "--jsonl"])
    assert len(json.loads(one.output)["readings"]) == 1
    assert len(json.loads(two.output)["readings"]) == 2
    assert [json.loads(line)["node_id"] for line in status.output.splitlines()] == ["alone"]


def test_tables_are_whole_in_a_pipe_and_in_a_narrow_terminal(secret: str) -> None:
    with Node.start(Config(node_id="a-node-with-a-long-name", secret_file=secret, pool_size="1MiB")) as node:
        options = ["--join", node.address, "--set", f"secret_file={secret}"]
        for command in (["status"], ["top", "--count", "1"]):
            output = CliRunner().invoke(app, [*command, *options], env={"COLUMNS": "40"}).output
            (row,) = [
                line for line in output.splitlines() if line.lstrip().startswith("a-node-with-a-long-name")
            ]
            assert "…" not in output
            assert (node.address if command == ["status"] else "0% of 1.0 MiB") in row
        (member,) = node.members()
    narrow = Console(width=40)
    with narrow.capture() as capture:
        narrow.print(top._table(None, _reading(1.0, member, p2pkv_pool_capacity_bytes=1 << 20)))
    text = capture.get()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 40


def test_a_first_reading_has_rates_since_each_nodes_start(secret: str) -> None:
    with Node.start(Config(node_id="n", secret_file=secret, pool_size="1MiB")) as node:
        (member,) = node.members()
        options = ["--join", node.address, "--set", f"secret_file={secret}", "--count", "1"]
        assert "rates are since each node's start" in CliRunner().invoke(app, ["top", *options]).output
    at_once = _reading(
        10.0, member, p2pkv_fetched_pages_total=3000, p2pkv_start_time_seconds=time.time() - 100
    )
    console = Console(width=200)
    with console.capture() as capture:
        console.print(top._table(None, at_once))
    assert re.search(r"\b(30|29)\b", capture.get())


def test_what_attached_engines_publish_is_their_nodes(secret: str) -> None:
    with Node.start(Config(node_id="n", secret_file=secret, pool_size="1MiB")) as node:
        (member,) = node.members()
    counted = {"p2pkv_published_pages_total": 100, "p2pkv_attach_stored_pages_total": 2400}
    console = Console(width=200)
    with console.capture() as capture:
        console.print(top._table(_reading(0.0, member), _reading(10.0, member, **counted)))
    assert re.search(r"\b250\b", capture.get())


def test_who_is_dead_is_shown_without_numbers(secret: str) -> None:
    with Node.start(Config(node_id="n", secret_file=secret, pool_size="1MiB")) as node:
        (member,) = node.members()
    reading = top.Reading(1.0, "a:1", [member, replace(member, node_id="m", state=State.DEAD)], {"n": {}})
    assert "1 node, found through a:1; 1 more are dead or have left" in str(top._headline(reading))
    console = Console(width=200)
    with console.capture() as capture:
        console.print(top._table(None, reading))
    assert "dead" in capture.get()
    assert "no answer" not in capture.get()


def test_a_node_that_does_not_answer_is_left_out(secret: str) -> None:
    with (
        Node.start(Config(node_id="alone", secret_file=secret, pool_size="1MiB")) as node,
        Outsider(cluster_keys(secret)) as outsider,
    ):
        (member,) = node.members()
        gone = replace(member, node_id="gone", boot_epoch=member.boot_epoch - 1)
        assert list(outsider.counters([gone, member], timeout=5.0)) == ["alone"]


def _reading(at: float, member: object, **counters: float) -> top.Reading:
    return top.Reading(at, "a:1", [member], {"n": counters})  # type: ignore[list-item]


def test_rates_are_a_second_and_start_anew_with_a_node(secret: str) -> None:
    with Node.start(Config(node_id="n", secret_file=secret, pool_size="1MiB")) as node:
        (member,) = node.members()
    before = _reading(10.0, member, p2pkv_fetched_pages_total=100, p2pkv_fetched_bytes_total=0)
    after = _reading(12.0, member, p2pkv_fetched_pages_total=500, p2pkv_fetched_bytes_total=2 * 1024**2)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(top._table(before, after))
    assert "200" in capture.get()
    assert "1.0 MiB" in capture.get()
    restarted = replace(member, boot_epoch=member.boot_epoch + 1)
    with console.capture() as capture:
        console.print(top._table(before, _reading(12.0, restarted, p2pkv_fetched_pages_total=500)))
    assert "200" not in capture.get()


@pytest.mark.parametrize(
    "body", [b"", b"\x81", b"\xc1", b"\x93\1\2\3", b"\x81\xa1a\xa1b", b"\x81\xa1a\xca\x7f\x80\0\0"]
)
def test_what_no_node_could_have_told_is_refused(body: bytes) -> None:
    with pytest.raises(ControlError, match="counters"):
        decode_counters(body)
