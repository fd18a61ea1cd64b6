"""A firewall can be told what to let through: every port that a node listens on is one of its settings."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from p2pkv import Config, Node
from p2pkv.cli.doctor.cluster import examine_cluster
from p2pkv.cli.doctor.finding import Verdict
from p2pkv.config import DATA_PORTS
from p2pkv.errors import ConfigError, TransportError
from p2pkv.testing.ports import free_port
from pair import NBYTES, N, Pair

_LISTENING = "0A"


def listening() -> set[int]:
    """Return the TCP ports that this process listens on."""
    links = (os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir())
    ours = {link.partition("socket:[")[2].rstrip("]") for link in links if "socket:[" in link}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENING and row[9] in ours}


def free_range(n: int) -> int:
    """Return the first of ``n`` ports in a row of which nobody has one."""
    for first in range(20000 + os.getpid() % 997 * 10, 32000, n):
        with ExitStack() as undo:
            try:
                for port in range(first, first + n):
                    probe = undo.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no ports in a row are free")


@pytest.fixture
def first() -> int:
    return free_range(2 * DATA_PORTS)


@pytest.fixture
def before() -> set[int]:
    return listening()


def config(name: str, ports: str, **more: object) -> Config:
    settings = {"node_id": name, "pool_size": "1MiB", "buffer_size": 0, "data_ports": ports, **more}
    return Config.load(settings, environ={})


def test_a_node_listens_where_it_was_told_to_and_nowhere_else(first: int, before: set[int]) -> None:
    ports = f"{first}-{first + 2 * DATA_PORTS - 1}"
    listen = free_port()
    with Node.start(config("a", ports, listen=f"127.0.0.1:{listen}", transports="auto")):
        assert listening() - before == {listen, *range(first, first + DATA_PORTS)}
        with Node.start(config("b", ports, transports=["shm", "tcp"])) as other:
            own = int(other.address.rpartition(":")[2])
            assert listening() - before == {listen, own, *range(first, first + 2 * DATA_PORTS)}
    assert listening() == before


def test_pages_and_transfers_go_over_them(tmp_path: Path, first: int) -> None:
    pair = Pair(tmp_path, transports=["tcp"], data_ports=f"{first}-{first + 2 * DATA_PORTS - 1}")
    assert pair.fetch_is_right(pair.publish())
    assert pair.destination.shape == (N, NBYTES)
    pair.close()


@pytest.mark.parametrize("n_taken", [1, DATA_PORTS])
def test_a_node_without_enough_of_them_does_not_start_and_says_why(
    first: int, before: set[int], n_taken: int
) -> None:
    with ExitStack() as undo:
        for port in range(first, first + n_taken):
            undo.enter_context(closing(socket.create_server(("127.0.0.1", port))))
        settings = config("a", f"{first}-{first + DATA_PORTS - 1}", transports=["tcp"])
        with pytest.raises(
            (ConfigError, TransportError), match=f"{first}-{first + DATA_PORTS - 1}: Address already in use"
        ):
            Node.start(settings)
        finding = next(f for f in examine_cluster(settings) if f.what == "data_ports")
        assert finding.verdict is Verdict.BAD
        assert f"{DATA_PORTS - n_taken} of {DATA_PORTS} are free" in finding.says
    assert listening() == before
    assert next(f for f in examine_cluster(settings) if f.what == "data_ports").verdict is Verdict.GOOD


@pytest.mark.parametrize("wrong", ["0", "70000", "7600-7500", "7500-", "-7500", "7500,7501", "any", "1-2-3"])
def test_what_is_no_range_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="data_ports must be a port or a range"):
        config("a", wrong)


def test_a_port_of_its_own_must_lie_outside() -> None:
    with pytest.raises(ConfigError, match="listen has port 7501, which is one of data_ports"):
        config("a", "7500-7599", listen="127.0.0.1:7501")
    with pytest.raises(ConfigError, match="metrics_port has port 7599"):
        config("a", "7500-7599", metrics_port=7599)
