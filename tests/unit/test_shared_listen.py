"""Several processes of a host with one line of settings: ``listen`` and ``join`` are the same address."""

from __future__ import annotations

import logging
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster import eventually
from p2pkv import Config, Node
from p2pkv.errors import ControlError
from p2pkv.testing.ports import free_port

SMALL = {"pool_size": "1MiB", "buffer_size": 0}


def _start(node_id: str, listen: str, join: str, **more: str) -> Node:
    return Node.start(Config(node_id=node_id, listen=listen, join=join, **{**SMALL, **more}))  # type: ignore[arg-type]


@pytest.mark.parametrize("first_listens_anywhere", [True, False])
def test_all_of_them_start_in_any_order_and_meet(
    first_listens_anywhere: bool, caplog: pytest.LogCaptureFixture
) -> None:
    join = f"127.0.0.1:{free_port()}"
    with ExitStack() as nodes:
        # one with a port of its own takes the join address if it comes first
        listens = ["127.0.0.1:0" if first_listens_anywhere else join, join, join]
        started = [
            nodes.enter_context(_start(f"rank{rank}", listen, join)) for rank, listen in enumerate(listens)
        ]
        eventually(lambda: all(len(node.members()) == 3 for node in started), 10.0)
        assert len({node.address for node in started}) == 3
    said = [record for record in caplog.records if "is another node's of this host" in record.getMessage()]
    assert len(said) == 2
    assert all(record.levelno == logging.WARNING for record in said)


def test_a_port_that_is_no_join_address_is_refused_and_its_holder_named() -> None:
    join = f"127.0.0.1:{free_port()}"
    with (
        _start("first", "127.0.0.1:0", join) as first,
        pytest.raises(ControlError, match="Address already in use; a node of this cluster has it"),
    ):
        _start("second", first.address, join)


def test_another_programs_port_is_refused_though_it_is_a_join_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(
            ControlError, match=r"Address already in use; another process has it: .* no connection"
        ):
            _start("node", address, address)


def test_another_clusters_port_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("the secret of another cluster")
    address = f"127.0.0.1:{free_port()}"
    with (
        _start("theirs", address, address, secret_file=str(secret)),
        pytest.raises(ControlError, match="does not let us in; is secret_file the cluster's"),
    ):
        _start("ours", address, address)
