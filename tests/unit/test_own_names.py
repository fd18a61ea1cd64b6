"""A host's own name leads to its loopback on itself, where Debian's installer wrote the name into /etc/hosts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from p2pkv import _native
from p2pkv.address import leads_to_loopback, reachable_host
from p2pkv.control.host_names import Names, look_up
from p2pkv.control.secret import ClusterKeys
from p2pkv.control.sockets import ControlServer, Socket
from p2pkv.errors import ConfigError

HOSTS = {"nodea": ["127.0.1.1"], "both": ["127.0.1.1", "10.99.0.7"]}


@contextmanager
def _server(listen: str) -> Iterator[ControlServer]:
    public, private = zmq.curve_keypair()
    names = Names(lambda host: HOSTS[host])
    names.wait_for([f"{host}:1" for host in HOSTS], 10.0)
    context: zmq.Context[Socket] = zmq.Context()
    try:
        server = ControlServer(context, ClusterKeys(public, private), listen, _native.Shard(64), names=names)
        yield server
        server.close()
    finally:
        context.destroy(0)


def test_a_join_address_by_the_own_name_is_the_address_others_find_it_at() -> None:
    with _server("127.0.0.1:0") as server:
        server.address = "10.99.0.1:7401"  # as on a host that has it
        assert server.resolve("nodea:7400") == ["10.99.0.1:7400"]
        assert server.resolve("both:7400") == ["10.99.0.1:7400", "10.99.0.7:7400"]
        assert server.resolve("127.0.0.1:7400") == ["127.0.0.1:7400"], "whoever writes that means it"
        server.address = "[fd00::1]:7401"
        assert server.resolve("nodea:7400") == ["[fd00::1]:7400"]


def test_a_node_of_this_machine_only_takes_the_name_as_it_is() -> None:
    with _server("127.0.0.1:0") as server:
        assert server.resolve("nodea:7400") == ["127.0.1.1:7400"]


def test_to_listen_on_a_name_that_nobody_else_could_reach_is_refused() -> None:
    refused = pytest.raises(ConfigError, match=r"nodea leads to 127.0.1.1 on this machine .* network address")
    with refused, _server("nodea:0"):
        pass
    with _server("localhost:0") as server:
        assert server.address.startswith("localhost:")


def test_an_own_name_in_join_does_not_tell_which_address_to_advertise() -> None:
    own_name = socket.gethostname()
    if not all(leads_to_loopback(f"{number}:1") for number in look_up(own_name)):
        pytest.skip(f"{own_name} does not lead to the loopback here")
    with pytest.raises(ConfigError, match="no join address tells"):
        reachable_host("0.0.0.0", [f"{own_name}:7400"])
