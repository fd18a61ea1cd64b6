"""Who keeps the memory of a node's pool: a process, or systemd, while the node is restarted."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cluster import eventually
from kept_nodes import serving
from p2pkv import Config
from p2pkv.errors import ConfigError
from p2pkv.keeper.memory import PoolMemory
from p2pkv.keeper.packets import LONGEST, read_request, receive, send
from p2pkv.keeper.process import ProcessKeeper
from p2pkv.keeper.server import _MOST_VISITORS, KeeperServer
from p2pkv.keeper.systemd import SystemdKeeper
from p2pkv.parts.kept_pool import kept_name

NAME = f"{1:016x}"
NAMES = (f"p2pkv-pool-{NAME}", f"p2pkv-records-{NAME}")


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "keeper").mkdir(mode=0o700)
    return f"{tmp_path}/keeper/s"


@contextmanager
def pool_memory(content: bytes = b"pages") -> Iterator[PoolMemory]:
    memory = PoolMemory(os.memfd_create("region"), os.memfd_create("records"))
    for fd in memory:
        os.write(fd, content)
    try:
        yield memory
    finally:
        memory.close()


def content_of(memory: PoolMemory | None) -> list[bytes]:
    assert memory is not None
    try:
        return [os.pread(fd, 100, 0) for fd in memory]
    finally:
        memory.close()


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_process_keeps_memory_for_whoever_comes_next(path: str) -> None:
    before = n_descriptors()
    with serving(path) as server:
        first = ProcessKeeper(path, NAME)
        assert first.take() is None
        assert not first.is_keeping
        with pool_memory() as memory:
            first.keep(memory)
        assert first.is_keeping
        first.close()
        second = ProcessKeeper(path, NAME)
        assert content_of(second.take()) == [b"pages"] * 2
        other = ProcessKeeper(path, f"{2:016x}")
        assert other.take() is None
        other.close()
        with pool_memory(b"later") as memory:
            second.keep(memory)
        assert content_of(second.take()) == [b"later"] * 2
        assert server.n_kept == 1
        second.drop()
        assert second.take() is None
        assert not second.is_keeping
        second.close()
        second.close()
    assert n_descriptors() == before


def test_a_keeper_that_is_restarted_gets_the_memory_again(path: str) -> None:
    with pool_memory() as memory:
        with serving(path):
            keeper = ProcessKeeper(path, NAME)
            keeper.keep(memory)
        eventually(lambda: not keeper.is_keeping, 5.0)
        with serving(path) as server:
            eventually(lambda: keeper.is_keeping, 5.0)
            assert server.n_kept == 1
            keeper.close()
            successor = ProcessKeeper(path, NAME)
            assert content_of(successor.take()) == [b"pages"] * 2
            successor.close()


def test_a_node_that_ends_while_its_keeper_is_away_says_what_is_lost(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pool_memory() as memory:
        with serving(path):
            keeper = ProcessKeeper(path, NAME)
            keeper.keep(memory)
        eventually(lambda: not keeper.is_keeping, 5.0)
        keeper.close()
    assert "what lies in the pool ends with this process" in caplog.text


def test_nonsense_is_refused_and_costs_no_descriptor(path: str) -> None:
    with serving(path) as server, pool_memory() as memory:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
            visitor.settimeout(20.0)
            visitor.connect(path)
            send(visitor, f"1 GIVE {NAME}")
            assert receive(visitor) == ("NONE", [])  # the visitor has been let in, which takes a descriptor
            before = n_descriptors()
            for text in (
                "2 GIVE a",
                "1 KEEP a",
                "1 TAKE a",
                "1 GIVE a/b",
                "1 GIVE " + "a" * 65,
                "x" * LONGEST,
            ):
                send(visitor, text, memory if text.startswith("1 G") else None)
                assert receive(visitor)[0].split()[0] in ("REFUSED",), text
            read, write = os.pipe()
            send(visitor, "1 KEEP a", PoolMemory(read, write))  # no memory
            assert receive(visitor)[0].startswith("REFUSED")
            PoolMemory(read, write).close()
            assert n_descriptors() == before
        assert server.n_kept == 0


def test_descriptors_that_come_with_nothing_are_closed(path: str) -> None:
    with (
        serving(path),
        pool_memory() as memory,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor,
    ):
        visitor.settimeout(20.0)
        before = n_descriptors()
        visitor.connect(path)
        send(visitor, "", memory)
        assert visitor.recv(100) == b""
        assert n_descriptors() == before


def test_a_keeper_without_descriptors_pauses_and_lets_in_who_waited(path: str) -> None:
    server = KeeperServer(path)
    visitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        visitor.settimeout(20.0)
        visitor.connect(path)
        send(visitor, f"1 GIVE {NAME}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        began, turns = time.monotonic(), 0
        while time.monotonic() - began < 1.0:
            server.serve(60.0)
            turns += 1
        assert turns <= 25  # two for each tenth of a second; without a pause it is tens of thousands
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        eventually(lambda: answers(server, visitor), 5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        visitor.close()
        server.close()


def test_a_keeper_goes_on_whose_first_visitor_speaks_while_he_has_to_go_for_another(path: str) -> None:
    server = KeeperServer(path)
    with ExitStack() as undo:
        undo.callback(server.close)

        def visitor() -> socket.socket:
            made = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            made.settimeout(20.0)
            made.connect(path)
            return made

        first = visitor()
        server.serve(20.0)
        for _ in range(_MOST_VISITORS - 1):
            visitor()
            server.serve(20.0)
        last = visitor()
        send(first, f"1 GIVE {NAME}")
        server.serve(20.0)  # both at once: he who comes is let in before the other one is heard
        with pytest.raises(ConnectionResetError):
            receive(first)
        send(last, f"1 GIVE {NAME}")
        server.serve(20.0)
        assert receive(last) == ("NONE", [])


def answers(server: KeeperServer, visitor: socket.socket) -> bool:
    """Whether who waits has an answer after one more turn."""
    server.serve(0.01)
    visitor.setblocking(False)
    try:
        return receive(visitor) == ("NONE", [])
    except BlockingIOError:
        return False


_STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind(sys.argv[1])
    os.chmod(sys.argv[1], 0o777)
    listener.listen(5)
    print("listens", flush=True)
    while True:
        visitor, _ = listener.accept()
        print("told", visitor.recv(100), flush=True)
"""
"""Another user's keeper, which says what it is told."""


@contextmanager
def another_users_keeper() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with tempfile.TemporaryDirectory(prefix="p2pkv-") as folder:  # those of pytest are closed to others
        os.chmod(folder, 0o777)
        command = [sys.executable, "-I", "-S", "-c", _STRANGER, f"{folder}/s"]
        stranger = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/")
        assert stranger.stdout is not None
        try:
            assert stranger.stdout.readline() == "listens\n"
            yield f"{folder}/s", stranger
        finally:
            stranger.kill()
            stranger.wait()
            stranger.stdout.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_is_no_keeper_and_is_told_nothing() -> None:
    before = n_descriptors()
    with another_users_keeper() as (path, stranger):
        with pytest.raises(ConfigError, match="another user's process listens there"):
            ProcessKeeper(path, NAME)
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "told b''\n"
    assert n_descriptors() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_that_takes_a_keepers_path_gets_nothing(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with another_users_keeper() as (elsewhere, stranger), pool_memory() as memory:
        with serving(path):
            keeper = ProcessKeeper(path, NAME)
            keeper.keep(memory)
        os.symlink(elsewhere, path)
        eventually(lambda: "another user's process listens there" in caplog.text, 10.0)
        assert not keeper.is_keeping
        keeper.close()
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "told b''\n"


def test_nodes_of_one_id_of_several_clusters_and_tenants_have_pools_of_their_own() -> None:
    names = {kept_name(cluster, 1) for cluster in ("p2pkv", "blue", "green", "tenant-0123456789abcdef")}
    assert len(names) == 4
    assert all(read_request(f"1 GIVE {name}") == ("GIVE", name) for name in names)
    assert kept_name("p2pkv", 1) == NAME  # as before there were others


def test_no_keeper_is_an_error_that_says_what_to_do(path: str) -> None:
    before = n_descriptors()
    with pytest.raises(ConfigError, match="start one with p2pkv keeper unix:"):
        ProcessKeeper(path, NAME)
    assert n_descriptors() == before


class FakeSystemd:
    """Stores what a service hands over, by name, as systemd's manager does."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._socket.settimeout(20.0)
        self.stored: dict[str, list[int]] = {}

    def hear(self, n_messages: int) -> None:
        for _ in range(n_messages):
            text, fds, _, _ = socket.recv_fds(self._socket, 4096, 4)
            lines = dict(line.split("=", 1) for line in text.decode().splitlines())
            if "FDSTORE" in lines:
                assert lines["FDPOLL"] == "0"
                self.stored.setdefault(lines["FDNAME"], []).extend(fds)
            else:
                assert lines["FDSTOREREMOVE"] == "1"
                for fd in self.stored.pop(lines["FDNAME"], []):
                    os.close(fd)

    def close(self) -> None:
        self._socket.close()
        for fd in (fd for fds in self.stored.values() for fd in fds):
            os.close(fd)


def test_systemd_keeps_one_pool_by_name(tmp_path: Path) -> None:
    systemd = FakeSystemd(f"{tmp_path}/notify")
    keeper = SystemdKeeper(NAME, {"NOTIFY_SOCKET": f"{tmp_path}/notify"})
    assert keeper.take() is None
    for content in (b"pages", b"later"):
        with pool_memory(content) as memory:
            keeper.keep(memory)
        systemd.hear(4)  # what was kept before is dropped first
        assert {name: len(fds) for name, fds in systemd.stored.items()} == dict.fromkeys(NAMES, 1)
    assert keeper.is_keeping
    assert [os.pread(systemd.stored[name][0], 100, 0) for name in NAMES] == [b"later"] * 2
    keeper.drop()
    systemd.hear(2)
    assert not systemd.stored
    keeper.close()
    systemd.close()


_AS_SYSTEMD = """
import fcntl, os, sys
program, *given = sys.argv[1:]
for to, fd in enumerate([fcntl.fcntl(int(fd), fcntl.F_DUPFD, 100) for fd in given], start=3):
    os.dup2(fd, to)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-c", program])
"""
"""A program that runs another one as systemd runs a service that had descriptors stored."""


def test_what_systemd_has_kept_comes_back_in_whatever_order() -> None:
    program = (
        "import os; from p2pkv.keeper.systemd import SystemdKeeper\n"
        f"keeper = SystemdKeeper('{NAME}'); memory = keeper.take()\n"
        "print([os.pread(fd, 9, 0) for fd in memory], os.get_inheritable(3), keeper.is_keeping)\n"
        "print('LISTEN_FDS' in os.environ, SystemdKeeper('0').take())"
    )
    with pool_memory(b"region") as (region, _), pool_memory(b"records") as (_, records):
        environ = {"LISTEN_FDS": "2", "LISTEN_FDNAMES": f"{NAMES[1]}:{NAMES[0]}", "NOTIFY_SOCKET": "/nowhere"}
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _AS_SYSTEMD, program, str(records), str(region)],
            pass_fds=(records, region),
            env=os.environ | environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    assert done.stdout == "[b'region', b'records'] False True\nFalse None\n"


def test_systemd_keeps_pools_of_a_node_and_its_tenants_and_none_that_nobody_has(tmp_path: Path) -> None:
    systemd = FakeSystemd(f"{tmp_path}/notify")
    names = [f"p2pkv-{kind}-{name}" for name in ("a", "b", "gone") for kind in ("pool", "records")]
    program = (
        "import os; from p2pkv.keeper.systemd import SystemdKeeper, drop_unclaimed\n"
        "for name in 'ba':\n"
        "    keeper = SystemdKeeper(name); memory = keeper.take()\n"
        "    print([os.pread(fd, 9, 0).decode() for fd in memory])\n"
        "    memory.close(); keeper.close()\n"
        "print(sorted(drop_unclaimed()), drop_unclaimed())\n"
        "print([fd for fd in range(3, 9) if os.path.exists(f'/proc/self/fd/{fd}')])"
    )
    with ExitStack() as undo:
        fds = []
        for name in names:
            fd = os.memfd_create(name)
            undo.callback(os.close, fd)
            os.write(fd, name.removeprefix("p2pkv-").encode()[:9])
            fds.append(fd)
            systemd.stored[name] = [os.dup(fd)]
        environ = {
            "LISTEN_FDS": "6",
            "LISTEN_FDNAMES": ":".join(names),
            "NOTIFY_SOCKET": f"{tmp_path}/notify",
        }
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _AS_SYSTEMD, program, *map(str, fds)],
            pass_fds=fds,
            env=os.environ | environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    assert done.stdout.splitlines() == [
        "['pool-b', 'records-b']",
        "['pool-a', 'records-a']",
        "['p2pkv-pool-gone', 'p2pkv-records-gone'] []",
        "[]",
    ]
    systemd.hear(2)
    assert list(systemd.stored) == names[:4]
    systemd.close()


def test_systemd_that_can_not_be_told_is_an_error() -> None:
    with pytest.raises(ConfigError, match="NotifyAccess=main"):
        SystemdKeeper(NAME, {})
    keeper = SystemdKeeper(NAME, {"NOTIFY_SOCKET": "/nowhere/notify"})
    with pytest.raises(ConfigError, match="can't be told"):
        keeper.drop()
    keeper.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "node_id is not"),
        ({"node_id": "a", "pool_size": 0}, "nothing to keep"),
        ({"node_id": "a", "huge_pages": "2MiB"}, "leave one of them out"),
        ({"node_id": "a", "attach": "unix:/a/b"}, "keeper must not be"),
        ({"node_id": "a", "keeper": "/a/b"}, "unix: and an absolute path"),
    ],
)
def test_what_a_keeper_does_not_go_with_is_said(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Config.load({"keeper": "systemd", **settings}, environ={})
    Config(node_id="a", keeper="systemd")


def test_a_second_keeper_at_one_path_is_told_of_the_first(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv.attach.host._TAKE_S", 0.0)
    with (
        serving(path),
        pytest.raises(ConfigError, match="another keeper listens there; give each keeper of a host"),
    ):
        KeeperServer(path)
