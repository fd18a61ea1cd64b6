"""Host names in addresses: looked up where nobody waits for them, however long that takes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zmq

from cluster import eventually
from p2pkv import Config, Node, _native
from p2pkv.control.host_names import Names
from p2pkv.control.patience import PatientLines
from p2pkv.control.secret import ClusterKeys
from p2pkv.control.sockets import ControlClient, ControlServer, Request, Socket
from p2pkv.control.wire import Kind
from p2pkv.directory.view import node_key
from p2pkv.testing.lateness import returns_within
from p2pkv.testing.ports import free_port

HANGING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>
int getaddrinfo(const char* name, const char* port, const struct addrinfo* hints, struct addrinfo** found) {
  static int (*real)(const char*, const char*, const struct addrinfo*, struct addrinfo**);
  if (!real) real = dlsym(RTLD_NEXT, "getaddrinfo");
  if (name && strstr(name, "hangs.test")) sleep(60);
  return real(name, port, hints, found);
}
"""

MEET = """
import os, sys, time
from p2pkv import Config, Node
join = [sys.argv[1], "hangs.test:7400"]
nodes = [Node.start(Config(node_id=name, join=join, pool_size="1MiB", buffer_size=0)) for name in "ab"]
until = time.monotonic() + 5
while time.monotonic() < until and any(len(node.members()) < 2 for node in nodes):
    time.sleep(0.02)
print([len(node.members()) for node in nodes], flush=True)
os._exit(0)  # a look-up is under way, and nothing ends it
"""


def test_a_number_is_an_address_at_once() -> None:
    def never(host: str) -> list[str]:
        raise AssertionError(f"{host} was looked up")

    names = Names(never)
    assert names.numeric("127.0.0.1:7400") == "127.0.0.1:7400"
    assert names.numeric("[::1]:7400") == "[::1]:7400"
    assert names.numeric("fe80::1%eth0:7400") == "[fe80::1%eth0]:7400"
    assert names.numeric("no address") is None


def test_a_name_that_hangs_holds_up_neither_callers_nor_other_names() -> None:
    hanging = threading.Event()

    def resolve(host: str) -> list[str]:
        if host == "hangs":
            hanging.wait()
        return {"four": ["10.0.0.4", "fd00::4"], "six": ["fd00::6"]}.get(host, ["10.0.0.1"])

    names = Names(resolve)
    with returns_within(1.0):
        assert names.numeric("hangs:1") is None
        names.wait_for(["four:1", "six:1", "hangs:1"], 0.2)
    assert names.numeric("four:1") == "10.0.0.4:1"
    assert names.numbers("four:1") == ["10.0.0.4:1", "[fd00::4]:1"]
    assert names.numeric("six:2") == "[fd00::6]:2"
    hanging.set()


def test_a_name_nobody_knows_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv.control.host_names._RETRY_S", 0.01)
    answers = iter([socket.gaierror(socket.EAI_AGAIN, "not now"), "10.0.0.1"])

    def resolve(host: str) -> list[str]:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return [answer]

    names = Names(resolve)
    assert names.numeric("late:1") is None
    eventually(lambda: names.numeric("late:1") == "10.0.0.1:1", 5.0)


def test_a_name_by_which_nobody_answers_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv.control.host_names._RETRY_S", 0.01)
    numbers = ["10.0.0.1"]
    names = Names(lambda _: list(numbers), fresh_s=3600.0)
    names.doubt("moved:1")  # nobody has used it yet
    names.wait_for(["moved:1"], 10.0)
    assert names.numeric("moved:1") == "10.0.0.1:1"
    numbers[:] = ["10.0.0.2"]

    def is_found() -> bool:
        names.doubt("moved:1")
        return names.numeric("moved:1") == "10.0.0.2:1"

    eventually(is_found, 10.0)


def test_who_is_often_doubted_is_not_asked_for_more_often_than_who_is_unknown() -> None:
    asked: list[str] = []

    def resolve(host: str) -> list[str]:
        asked.append(host)
        return ["10.0.0.1"]

    names = Names(resolve)
    names.wait_for(["moved:1"], 10.0)
    for _ in range(100):
        names.doubt("moved:1")
    assert asked == ["moved"]
    names.doubt("10.0.0.1:1")
    names.doubt("no address")


@pytest.mark.parametrize("kind", ["calls", "patient lines"])
def test_a_node_that_is_elsewhere_by_now_is_found_soon(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv.control.host_names._RETRY_S", 0.01)
    keys = ClusterKeys(*zmq.curve_keypair())
    context: zmq.Context[Socket] = zmq.Context()
    server = ControlServer(context, keys, "127.0.0.1:0", _native.Shard(1024))
    server.loop.announce(node_key("server"), 17)
    server.start()
    numbers = ["127.0.0.77"]
    names = Names(lambda _: list(numbers), fresh_s=3600.0)
    client = ControlClient(context, keys, names)
    lines = PatientLines(client)
    request = Request(f"moved.test:{server.address.rpartition(':')[2]}", Kind.PROBE)
    names.wait_for([request.address], 10.0)

    def answers() -> bool:
        if kind == "calls":
            return client.ask(request, 0.1) is not None
        return lines.ask([request], 0.1) != [None]

    assert not answers()
    numbers[:] = ["127.0.0.1"]
    eventually(answers, 15.0)  # a name is believed for 30 s
    client.close()
    server.close()
    context.destroy(0)


class Doubts(Names):
    """Notes what is doubted."""

    def __init__(self) -> None:
        super().__init__()
        self.doubted: list[str] = []

    def doubt(self, address: str) -> None:
        self.doubted.append(address)


def test_who_was_hardly_waited_for_is_not_taken_to_be_elsewhere() -> None:
    now, names = 100.0, Doubts()
    context: zmq.Context[Socket] = zmq.Context()
    client = ControlClient(context, ClusterKeys(*zmq.curve_keypair()), names, now=lambda: now)
    request = Request(f"127.0.0.1:{free_port()}", Kind.PROBE)
    with client.send([request]):
        now += 0.05
    assert not names.doubted
    with client.send([request]):
        now += 0.5
    assert names.doubted == [request.address]
    client.close()
    context.destroy(0)


def test_peers_cannot_have_any_number_of_names_looked_up() -> None:
    hanging = threading.Event()
    asked: list[str] = []

    def resolve(host: str) -> list[str]:
        asked.append(host)
        hanging.wait()
        return ["10.0.0.1"]

    names = Names(resolve)
    for i in range(100):
        assert names.numeric(f"host-{i}:1") is None
    assert len(asked) <= 16
    hanging.set()


def test_nodes_meet_at_a_name() -> None:
    join = [f"localhost:{free_port()}"]
    settings = {"join": join, "pool_size": "1MiB", "buffer_size": 0}
    with Node.start(Config(node_id="a", **settings)) as a, Node.start(Config(node_id="b", **settings)) as b:  # type: ignore[arg-type]
        eventually(lambda: len(a.members()) == len(b.members()) == 2, 5.0)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build a resolver that hangs with")
def test_nodes_meet_while_the_name_of_a_join_address_is_looked_up_for_a_minute(tmp_path: Path) -> None:
    source, library = tmp_path / "hanging.c", tmp_path / "hanging.so"
    source.write_text(HANGING)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    met = subprocess.run(
        [sys.executable, "-c", MEET, f"127.0.0.1:{free_port()}"],
        env=os.environ | {"LD_PRELOAD": str(library)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
        check=True,
    )
    assert met.stdout == "[2, 2]\n"


def test_a_signals_handler_may_ask_for_a_name_wherever_its_thread_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that closes a node does, to say goodbye; a thread that looks a name up is waited for until it runs."""
    names, start, asked = Names(lambda _: ["127.0.0.2"]), threading.Thread.start, threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == "p2pkv-names":
            names.numeric("first:1")
        start(thread)

    def ask() -> None:
        names.numeric("first:1")
        asked.set()

    with monkeypatch.context() as signaled:
        signaled.setattr(threading.Thread, "start", interrupted)
        threading.Thread(target=ask, daemon=True).start()
        assert asked.wait(30.0)
    eventually(lambda: names.numeric("first:1") == "127.0.0.2:1", 30.0)
