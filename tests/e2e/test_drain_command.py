"""`p2pkv node` hands its pages over when it is told to end, by a signal or by `p2pkv drain`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import pages
from cluster import eventually
from p2pkv import Config, Node
from p2pkv.cli import app

KEYS = [f"page {i}" for i in range(20)]
PAGE = 16384


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("an example of a secret")
    return str(path)


@pytest.fixture
def reader(secret: str) -> Iterator[Node]:
    with Node.start(_config("reader", secret)) as node:
        yield node


@pytest.fixture
def command(reader: Node, secret: str) -> Iterator[subprocess.Popen[str]]:
    """A node that runs by itself, and has pages that another one has left to it."""
    settings = ["node_id=server", f"secret_file={secret}", f"join={reader.address}", "pool_size=16MiB"]
    options = [word for setting in settings for word in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", "p2pkv", "node", *options], stdout=subprocess.PIPE, text=True
    )
    try:
        eventually(lambda: len(reader.members()) == 2, 30.0)
        with Node.start(_config("engine", secret, join=reader.address, pool_size="1MiB")) as engine:
            eventually(lambda: len(engine.members()) == 3, 30.0)
            memory = np.zeros((len(KEYS), PAGE), np.uint8)
            pages.fill(memory, KEYS)
            engine.register_memory(memory)
            assert engine.publish(KEYS, memory).all()
            # the reader has a pool of 64 KiB, of which one part of three is for others' pages
            assert engine.drain(10.0).receivers["server"] >= len(KEYS) - 4
        yield process
    finally:
        process.kill()
        process.communicate()


def _config(node_id: str, secret: str, **more: object) -> Config:
    settings = {"pool_size": "64KiB", "buffer_size": 0, "deadline": 5.0, "secret_file": secret} | more
    return Config(node_id=node_id, **settings)  # type: ignore[arg-type]


def _ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return said


def _found(node: Node) -> int:
    memory = np.zeros((len(KEYS), PAGE), np.uint8)
    with node.register_memory(memory):
        hits = node.fetch(KEYS, memory)
    assert pages.wrong(memory, KEYS, hits) == []
    return int(hits.sum())


def test_a_signal_has_it_hand_its_pages_over(
    command: subprocess.Popen[str], reader: Node, secret: str
) -> None:
    with Node.start(_config("other", secret, join=reader.address, pool_size="16MiB")) as other:
        eventually(lambda: len(other.members()) == 3, 30.0)
        command.send_signal(signal.SIGTERM)
        assert "handed over" in (said := _ended(command))
        assert said.endswith("node server left its cluster\n")
        eventually(lambda: len(other.members()) == 2, 30.0)
        assert _found(other) == len(KEYS)


def test_the_command_has_it_hand_its_pages_over_and_end(
    command: subprocess.Popen[str], reader: Node, secret: str
) -> None:
    asked = ["--join", reader.address, "--set", f"secret_file={secret}"]
    wrong = CliRunner().invoke(app, ["drain", "nobody", *asked])
    assert "no live node is called 'nobody'; there are reader, server" in str(wrong.exception)
    with Node.start(_config("other", secret, join=reader.address, pool_size="16MiB")) as other:
        eventually(lambda: len(other.members()) == 3, 30.0)
        done = CliRunner().invoke(app, ["drain", "server", "--json", *asked])
        assert done.exit_code == 0, done.output
        drained = json.loads(done.output)
        if drained is not None:  # it may have gone before it was asked how far it is
            assert (drained["n_handed_over"], drained["reason"]) == (drained["n_pages"], "")
        _ended(command)
        eventually(lambda: len(other.members()) == 2, 30.0)
        assert _found(other) == len(KEYS)
