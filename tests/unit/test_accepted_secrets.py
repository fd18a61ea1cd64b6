"""Clients that have several secrets find out by which one a server goes, also when that changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from cluster import eventually
from p2pkv import Config, _native
from p2pkv.control.secret import ClusterKeys, cluster_keys
from p2pkv.control.sockets import ControlClient, ControlServer, Request, Socket
from p2pkv.control.wire import Kind
from p2pkv.directory.registry.seal import Seal
from p2pkv.directory.view import Member, node_key
from p2pkv.errors import ConfigError, ViewError
from p2pkv.instances.teller import Teller
from p2pkv.testing.ports import free_port

ANSWER_S = 10.0


class Secrets:
    """Files of secrets, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def file(self, name: str) -> str:
        path = self._folder / name
        path.touch(mode=0o600)
        path.write_text(f"the secret {name} of this test")
        return str(path)

    def keys(self, name: str, *accepted: str) -> ClusterKeys:
        return cluster_keys(self.file(name), [self.file(other) for other in accepted])


@pytest.fixture
def secrets(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path)


@contextmanager
def server_at(address: str, keys: ClusterKeys) -> Iterator[ControlServer]:
    context: zmq.Context[Socket] = zmq.Context()
    server = ControlServer(context, keys, address, _native.Shard(1024))
    server.loop.announce(node_key("server"), 17)
    server.start()
    try:
        yield server
    finally:
        server.close()
        context.term()


@contextmanager
def client_of(keys: ClusterKeys) -> Iterator[ControlClient]:
    context: zmq.Context[Socket] = zmq.Context()
    client = ControlClient(context, keys)
    try:
        yield client
    finally:
        client.close()
        context.term()


def is_answered(client: ControlClient, server: ControlServer, timeout: float = ANSWER_S) -> bool:
    return client.ask(Request(server.address, Kind.PROBE), timeout) is not None


@pytest.mark.parametrize("own", ["old", "new"])
@pytest.mark.parametrize("servers", ["old", "new"])
def test_who_has_both_is_answered_by_servers_of_either(secrets: Secrets, own: str, servers: str) -> None:
    keys = secrets.keys(own, {"old": "new", "new": "old"}[own])
    with server_at("127.0.0.1:0", secrets.keys(servers)) as server, client_of(keys) as client:
        for _ in range(3):
            assert is_answered(client, server)
        requests = [Request(server.address, Kind.PROBE)] * 20
        with client.send(requests) as calls:
            assert sorted(index for index, _ in calls.replies(ANSWER_S)) == list(range(20))
        # It is known by now by which one it goes. What the server refused says less: it may not have looked at the
        # first request's other line until now.
        lines = [client.borrow(server.address) for _ in range(25)]  # more than lie idle
        assert [len(of_one) for of_one in lines] == [1] * 25
        for (line,) in lines:
            client.give_back(server.address, line)


def test_a_server_that_is_started_again_with_the_other_one_is_found_anew(secrets: Secrets) -> None:
    address = f"127.0.0.1:{free_port()}"
    with client_of(secrets.keys("old", "new")) as client:
        for name in ("old", "new", "old"):
            with server_at(address, secrets.keys(name)) as server:
                eventually(lambda server=server: is_answered(client, server, 0.5), ANSWER_S)
                with client.send(
                    [Request(address, Kind.PROBE)] * 8
                ) as calls:  # several sockets lie idle then
                    assert len(list(calls.replies(ANSWER_S))) == 8
        client.forget(address)  # as when the view says that it has gone
        with server_at(address, secrets.keys("new")) as server:
            assert is_answered(client, server)


def test_a_secret_that_is_not_accepted_leads_nowhere(secrets: Secrets) -> None:
    with server_at("127.0.0.1:0", secrets.keys("new")) as server:
        for keys in (secrets.keys("old"), secrets.keys("old", "another"), secrets.keys("another")):
            with client_of(keys) as client:
                assert not is_answered(client, server, 0.3)
        with client_of(secrets.keys("new")) as client:
            assert is_answered(client, server)
        # whoever accepts one as a client lets nobody in by it as a server
    with (
        server_at("127.0.0.1:0", secrets.keys("new", "old")) as server,
        client_of(secrets.keys("old")) as client,
    ):
        assert not is_answered(client, server, 0.3)


def test_a_server_with_a_retired_secret_is_not_asked(secrets: Secrets) -> None:
    with server_at("127.0.0.1:0", secrets.keys("old")) as server:
        with client_of(secrets.keys("new", "old")) as client:
            assert is_answered(client, server)
        with client_of(secrets.keys("new")) as client:
            assert not is_answered(client, server, 0.3)


@pytest.mark.parametrize("own", ["old", "new"])
@pytest.mark.parametrize("routers", ["old", "new"])
def test_a_router_of_either_hears_everything(secrets: Secrets, own: str, routers: str) -> None:
    keys, its = secrets.keys(own, {"old": "new", "new": "old"}[own]), secrets.keys(routers)
    with zmq.Context() as context:
        router = context.socket(zmq.PULL)
        router.linger = 0
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = its.public, its.private
        port = router.bind_to_random_port("tcp://127.0.0.1")
        teller = Teller(context, f"127.0.0.1:{port}", keys, who="this test")
        eventually(lambda: teller.send(b"0"), ANSWER_S)
        told = [b"%d" % i for i in range(1, 40)]
        for message in told:
            assert teller.send(message)
        heard = []
        while len(heard) <= len(told) and router.poll(ANSWER_S * 1e3):
            heard.append(router.recv())
        assert heard == [b"0", *told]
        teller.close()
        router.close()


def test_records_of_either_are_opened_and_none_of_a_third(secrets: Secrets) -> None:
    member = Member("n1", 17, "127.0.0.1:7400")
    records = {name: Seal(secrets.keys(name), "c").close(member) for name in ("old", "new", "third")}
    reader = Seal(secrets.keys("new", "old"), "c")
    assert reader.close(member) == records["new"]
    for name in ("old", "new"):
        assert reader.open(records[name]) == member
    with pytest.raises(ViewError, match="not sealed with this cluster's secret"):
        reader.open(records["third"])
    with pytest.raises(ViewError, match="not sealed with this cluster's secret"):
        Seal(secrets.keys("new"), "c").open(records["old"])


def test_the_own_secret_is_not_accepted_twice(secrets: Secrets) -> None:
    assert secrets.keys("a", "a").accepted == ()
    assert len(secrets.keys("a", "b", "b").accepted) == 1


def test_what_can_be_no_secret_is_said_with_the_setting(secrets: Secrets, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read accepted_secret_files .*gone"):
        cluster_keys(secrets.file("a"), [str(tmp_path / "gone")])
    with pytest.raises(ConfigError, match="accepted besides secret_file; set that, too"):
        Config(accepted_secret_files=[secrets.file("b")])
    loaded = Config.load({"secret_file": "a", "accepted_secret_files": "b, c"}, environ={})
    assert tuple(loaded.accepted_secret_files) == ("b", "c")


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    secret, fifo = tmp_path / "secret", str(tmp_path / "fifo")
    os.mkfifo(fifo, 0o600)
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    with pytest.raises(ConfigError, match=r"^secret_file .*fifo is no regular file"):
        cluster_keys(fifo)
    with pytest.raises(ConfigError, match=r"accepted_secret_files .*fifo is no regular file"):
        cluster_keys(str(secret), [fifo])
