"""What is wrong with a router's arguments is one sentence, before it serves, and no traceback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "from p2pkv_proxy.cli import main; main()", "--listen", "127.0.0.1:0"]


def refused(*arguments: str) -> str:
    """Return the one line that a router which does not start writes."""
    [line] = written(*arguments)
    return line


def written(*arguments: str) -> list[str]:
    """Return the lines that a router which does not start writes."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_heartbeat_address_that_is_taken_is_said_in_one_line(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refused("--heartbeats", address, "--workers", workers)
    assert said == (
        f"p2pkv-proxy: cannot take heartbeats on {address}: Address already in use; --heartbeats takes another address"
    )


def test_heartbeats_from_elsewhere_without_a_secret_are_said_in_one_line() -> None:
    assert "without --secret-file heartbeats are taken on loopback only" in refused(
        "--heartbeats", "0.0.0.0:0"
    )


def test_an_address_to_join_that_is_none_is_refused() -> None:
    assert refused("--join", "nope") == "p2pkv-proxy: --join must be HOST:PORT, not 'nope'"


def test_a_taken_port_for_clients_is_said_in_one_line_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("--heartbeats", "127.0.0.1:0", "--listen", f"127.0.0.1:{port}")
    assert said == f"p2pkv-proxy: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_what_a_router_logs_is_chosen_and_may_be_for_programs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ["--heartbeats", address, "--policy", "cache_aware"]
        warning, _ = written(*options, "--log-format", "json")
        assert len(written(*options, "--log-level", "error")) == 1
    said = json.loads(warning)
    assert (said["level"], said["logger"]) == ("warning", "p2pkv_proxy.cli")
    assert "--policy cache_aware goes by what the p2pkv nodes hold" in said["message"]
