"""Why an engine is not let in, and what to do about it."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cluster import eventually
from p2pkv import Config, Node, _native
from p2pkv.attach.host import EngineSocket, PathWatch
from p2pkv.attach.own_host import OwnHost
from p2pkv.errors import ConfigError, ControlError
from p2pkv.keeper.server import KeeperServer

WELCOME = struct.Struct("=IHHQQQ264s136s")
MAGIC = 0x57413250
ANSWER_S = 30.0


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


def refusal(path: str) -> str:
    with pytest.raises(ControlError) as refused:
        OwnHost(path, 0, lambda attachment, boot: None, lambda boot: None)
    assert f"cannot attach to the node at 'unix:{path}': " in str(refused.value)
    return str(refused.value)


@contextmanager
def listening(path: str, backlog: int = 8) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(path)
        server.listen(backlog)
        yield server


@contextmanager
def answering(path: str, packet: bytes) -> Iterator[None]:
    """Say this to whoever comes, once; nothing at all, and hang up, if it is empty."""
    with listening(path) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                if packet:
                    connection.send(packet)

        thread = threading.Thread(target=answer)
        thread.start()
        yield
        thread.join(ANSWER_S)
        assert not thread.is_alive()


def test_nobody_is_there(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv.attach.own_host.APPEAR_S", 0.3)
    assert "start one there (p2pkv node with attach_listen), or leave attach out" in refusal(path)


def test_a_node_that_is_being_restarted_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("p2pkv.attach.own_host.APPEAR_S", 60.0)
    tmp_path.chmod(0o700)
    attach = f"unix:{tmp_path}/s"
    with listening(attach.removeprefix("unix:")):
        pass  # it leaves its path as a node does that was killed
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(Node.start, Config(node_id="engine", attach=attach))
        eventually(lambda: "yet: no node listens there" in caplog.text, 20.0)
        with (
            Node.start(Config(node_id="host", pool_size="1MiB", attach_listen=attach)),
            starting.result(60.0) as engine,
        ):
            assert engine.owner_id == "host"


@pytest.mark.parametrize(
    ("packet", "advice"),
    [
        (WELCOME.pack(MAGIC, 99, 1, 0, 0, 0, b"", b""), "speaks version 99 of attaching, and this p2pkv"),
        (struct.pack("=IHHQQQ264s", MAGIC, 3, 1, 0, 0, 0, b""), "speaks version 3 of attaching"),
        (WELCOME.pack(MAGIC, 4, 2, 0, 0, 0, b"", b""), "end an engine of this host, or leave attach out"),
        (b"SSH-2.0-OpenSSH_9.6", "no node of p2pkv; is attach right?"),
        (b"", "the node there hung up"),
    ],
)
def test_who_is_there_does_not_let_it_in(path: str, packet: bytes, advice: str) -> None:
    with answering(path, packet):
        said = refusal(path)
    assert advice in said
    assert "start one there" not in said


def test_a_node_that_takes_nobody_in_at_the_moment_is_told_from_none(path: str) -> None:
    with listening(path, backlog=1), ExitStack() as others:
        for _ in range(64):
            other = others.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            other.setblocking(False)
            if other.connect_ex(path) != 0:
                break
        assert "does not let anybody in at the moment; is it stopped?" in refusal(path)


def test_one_that_starts_while_another_one_is_about_to_listen_does_not_have_the_path_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "host"
    folder.mkdir(mode=0o700)
    path, chmod, said = str(folder / "s"), os.chmod, []

    def start_another_one(there: str, mode: int) -> None:  # between the first one's bind and its listen
        chmod(there, mode)
        with pytest.raises(ConfigError) as refused:
            EngineSocket(path)
        said.append(str(refused.value))

    monkeypatch.setattr(os, "chmod", start_another_one)
    monkeypatch.setattr("p2pkv.attach.host._TAKE_S", 0.0)
    first = EngineSocket(path)
    try:
        assert len(said) == 1
        assert "another node takes a path in its folder at the moment" in said[0]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
            visitor.connect(path)
        monkeypatch.undo()
        monkeypatch.setattr("p2pkv.attach.host._TAKE_S", 0.0)
        with pytest.raises(ConfigError, match="another node listens there"):
            EngineSocket(path)
    finally:
        first.close()
    assert list(folder.iterdir()) == []
    EngineSocket(path).close()


def test_a_path_on_a_file_system_that_is_read_only_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed node has left can't be removed, and neither can a node that ends leave the path free."""
    folder = tmp_path / "host"
    folder.mkdir(mode=0o700)
    path = str(folder / "s")

    def refuse(_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    killed = EngineSocket(path)
    monkeypatch.setattr(os, "unlink", refuse)
    killed.close()
    with pytest.raises(ConfigError, match="cannot listen there: Read-only file system"):
        EngineSocket(path)
    monkeypatch.undo()
    EngineSocket(path).close()
    assert list(folder.iterdir()) == []


def test_a_path_that_a_killed_node_has_left_is_taken_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "host"
    folder.mkdir(mode=0o700)
    path = str(folder / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(path)
        left.listen()
    monkeypatch.setattr("p2pkv.attach.host._TAKE_S", 0.0)  # else it would be tried once more, after a while
    with EngineSocket(path), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
        visitor.connect(path)


def attaches(path: str, engines: list[_native.Attachment]) -> bool:
    """Whether one more is let in: the node notices a moment later that another one has gone."""
    try:
        engines.append(_native.Attachment.open(path, ANSWER_S, mark=0))
    except RuntimeError:
        return False
    return True


def test_there_is_a_place_for_64_engines_and_the_next_one_gets_it_when_one_ends(tmp_path: Path) -> None:
    folder = tmp_path / "host"
    folder.mkdir(mode=0o700)
    path = str(folder / "s")
    with Node.start(
        Config(node_id="host", listen="127.0.0.1:0", pool_size="8MiB", attach_listen=f"unix:{path}")
    ):
        engines = [_native.Attachment.open(path, ANSWER_S, mark=0) for _ in range(64)]
        try:
            assert "has let in 64 engines" in refusal(path)
            engines.pop().close()
            eventually(lambda: attaches(path, engines), 10.0)
        finally:
            for engine in engines:
                engine.close()


def test_a_node_listens_again_where_its_path_was_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by what tidies up old files, or where a user's /run goes with his last session, the folder with it."""
    folder = tmp_path / "host"
    path = folder / "s"
    attach = f"unix:{path}"
    with (
        Node.start(Config(node_id="host", pool_size="1MiB", attach_listen=attach)),
        Node.start(Config(node_id="first", attach=attach)) as first,
    ):
        for remove in (path.unlink, lambda: shutil.rmtree(folder)):
            caplog.clear()
            remove()
            eventually(path.exists, 10.0)
            with Node.start(Config(node_id="next", attach=attach)) as engine:
                assert engine.owner_id == "host"
            eventually(lambda: f"unix:{path} was removed; this node listens there again" in caplog.text, 10.0)
        assert first.counters()["p2pkv_attached"] == 1
    assert not path.exists()


def test_a_node_takes_its_path_from_nobody_who_has_it_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("p2pkv.attach.host._TAKE_S", 0.0)
    folder = tmp_path / "host"
    folder.mkdir(mode=0o700)
    path = str(folder / "s")
    before = EngineSocket(path)
    watch = PathWatch(before, "this node")
    assert not watch.look()
    os.unlink(path)
    since = EngineSocket(path)
    assert not watch.look()
    assert [before.is_found, since.is_found] == [False, True]
    assert "another node listens there" in caplog.text
    since.close()
    assert watch.look()
    assert [before.is_found, watch.look()] == [True, False]
    before.close()
    assert not os.path.exists(path)


def test_a_path_is_not_its_own_that_has_the_same_number_in_another_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where /run/user went with a user's last session, and is there anew with his next one."""
    tmp_path.chmod(0o700)
    path = str(tmp_path / "s")
    listener, stat = EngineSocket(path), os.stat

    def stat_in_another(where: str) -> os.stat_result:
        mode, number, device, *rest = stat(where)
        return os.stat_result([mode, number, device + 1, *rest])

    with monkeypatch.context() as patches:
        patches.setattr("p2pkv.attach.host.os.stat", stat_in_another)
        assert not listener.is_found
        listener.close()
    assert os.path.exists(path)


def test_programs_that_a_node_starts_do_not_listen_for_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "s"

    def n_inherited() -> int:
        return sum(map(is_inherited, os.listdir("/proc/self/fd")))

    def is_inherited(descriptor: str) -> bool:
        try:
            return os.get_inheritable(int(descriptor))
        except OSError:
            return False  # that of the listing itself

    n_before = n_inherited()
    with Node.start(Config(node_id="host", pool_size="1MiB", attach_listen=f"unix:{path}")):
        assert n_inherited() == n_before
        path.unlink()
        eventually(path.exists, 10.0)
        with Node.start(Config(node_id="engine", attach=f"unix:{path}")):
            assert n_inherited() == n_before


def test_a_node_that_lacks_a_thread_to_look_after_its_path_leaves_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    path, start = tmp_path / "s", threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "p2pkv-attach-at":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    with pytest.raises(RuntimeError, match="new thread"):
        Node.start(Config(node_id="host", pool_size="1MiB", attach_listen=f"unix:{path}"))
    assert not path.exists()


def test_a_keeper_listens_again_where_its_path_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv.keeper.server.PATH_LOOK_S", 0.0)
    tmp_path.chmod(0o700)
    path = str(tmp_path / "keeper")
    keeper = KeeperServer(path)
    os.unlink(path)
    keeper.serve(0.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
        visitor.settimeout(ANSWER_S)
        visitor.connect(path)
        visitor.send(b"1 GIVE nobody")
        keeper.serve(ANSWER_S)  # lets it in
        keeper.serve(ANSWER_S)
        assert visitor.recv(4096) == b"NONE"
    keeper.close()
