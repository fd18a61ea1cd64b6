"""What a node's HTTP port says to those who ask whether it is well."""

from __future__ import annotations

import logging
import socket
import urllib.error
import urllib.request

import pytest

from cluster import eventually
from p2pkv import Config, MembershipError, Node
from p2pkv.errors import ConfigError
from p2pkv.testing.listening import addresses
from p2pkv.testing.ports import free_port

SILENT = "192.0.2.1:7400"
"""An address of no machine: it is set aside for examples."""


def _config(node_id: str, **more: object) -> Config:
    return Config(node_id=node_id, pool_size="1MiB", buffer_size=0, **more)  # type: ignore[arg-type]


def _get(node: Node, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{node.metrics_port}{path}", timeout=10) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_node_that_is_alone_is_alive_and_not_ready_until_another_comes() -> None:
    join = f"127.0.0.1:{free_port()}"
    with Node.start(_config("one", join=[SILENT, join], metrics_port=0)) as node:
        assert _get(node, "/healthz") == (200, "ok\n")
        status, why = _get(node, "/readyz")
        assert (status, "this node is alone" in why) == (503, True)
        assert node.counters()["p2pkv_alone"] == 1
        with Node.start(_config("two", join=join)):
            eventually(lambda: _get(node, "/readyz") == (200, "ready\n"), 10.0)
            assert node.counters()["p2pkv_alone"] == 0
        eventually(lambda: _get(node, "/readyz")[0] == 503, 10.0)


@pytest.mark.parametrize("join", [(), (f"127.0.0.1:{free_port()}",)], ids=["no join", "all its own"])
def test_the_first_node_of_a_cluster_is_ready(join: tuple[str, ...]) -> None:
    with Node.start(_config("first", join=join, metrics_port=0)) as node:
        assert _get(node, "/readyz") == (200, "ready\n")


@pytest.mark.parametrize("setting", ["metrics_port", "indexer", "kv_events"])
def test_others_hear_nothing_of_a_node_whose_port_is_taken(
    setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    join = f"127.0.0.1:{free_port()}"
    with Node.start(_config("good", join=join)) as good, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = {"metrics_port": port, "kv_events": f"tcp://127.0.0.1:{port}"}.get(
            setting, f"127.0.0.1:{port}"
        )
        caplog.set_level(logging.INFO)
        with pytest.raises(ConfigError, match="Address already in use"):
            Node.start(_config("bad", join=join, **{setting: address}))
        # who joins is heard of by the node that it joins before its start goes on
        assert "node bad" not in caplog.text
        assert [member.node_id for member in good.members()] == ["good"]


def test_the_port_serves_what_it_says_and_nothing_else() -> None:
    # a port that the kernel gives to nothing else of this node, whose other listeners are at other addresses
    port = free_port()
    before = addresses()
    with Node.start(_config("one", metrics_port=port, metrics_host="127.0.0.2")) as node:
        status, text = _get(node, "/metrics", "127.0.0.2")
        assert status == 200
        assert "p2pkv_members 1.0" in text
        assert _get(node, "/health", "127.0.0.2")[0] == 404
        # Who else listens at that number is not asked: another process may do so, at another address.
        opened = [one.where for one in addresses() if one not in before and isinstance(one.where, tuple)]
        assert [where for where in opened if where[1] == port] == [("127.0.0.2", port)]


def test_a_port_that_is_taken_is_said() -> None:
    with (
        Node.start(_config("one", metrics_port=0)) as node,
        pytest.raises(
            ConfigError, match=f"cannot serve metrics on 127.0.0.1:{node.metrics_port}: Address already"
        ),
    ):
        Node.start(_config("two", metrics_port=node.metrics_port))


def test_a_node_that_must_join_starts_only_where_somebody_is() -> None:
    join = f"127.0.0.1:{free_port()}"
    with pytest.raises(MembershipError, match="must_join is set, and no other node"):
        Node.start(_config("two", join=join, must_join=True))
    with (
        Node.start(_config("one", join=join)),
        Node.start(_config("two", join=join, must_join="true")) as node,
    ):
        assert len(node.members()) == 2
    with pytest.raises(ConfigError, match="must_join is set, but join is not"):
        _config("two", must_join=True)


def test_a_node_whose_pool_cannot_be_made_is_never_a_member() -> None:
    with Node.start(_config("there")) as node:
        with pytest.raises(ConfigError, match="pool"):
            Node.start(Config(node_id="too-large", pool_size="500TiB", buffer_size=0, join=node.address))
        assert node._parts.membership.view().get("too-large") is None, "others keep who left"
