"""Engines that attach to their host's node: its pool is theirs, and outlives them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from cluster import Cluster, NodeProcess, all_are_fetched, eventually
from p2pkv import _native
from p2pkv.testing.lateness import returns_within
from p2pkv.testing.processes import RefusedError

KEYS = [f"page-{i}" for i in range(32)]
_ADD_SEALS, _SEAL_SHRINK = 1033, 2  # of <linux/fcntl.h>


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "host").mkdir(mode=0o700)
    return f"unix:{tmp_path}/host/s"


def host(cluster: Cluster, path: str, **options: object) -> NodeProcess:
    return cluster.start("host", attach_listen=path, **options)


def engine(cluster: Cluster, path: str, name: str = "engine", **options: object) -> NodeProcess:
    return cluster.start(name, attach=path, **options)


@pytest.mark.parametrize("in_memfd", [True, False])
def test_what_an_engine_publishes_is_found_by_everybody(cluster: Cluster, path: str, in_memfd: bool) -> None:
    owner, other = host(cluster, path), cluster.start("other")
    cluster.meet(owner, other)
    first, second = engine(cluster, path, in_memfd=in_memfd), engine(cluster, path, "second")
    assert first.call("publish", keys=KEYS, nbytes=65536) == [1] * len(KEYS)
    for node in (first, second, owner, other):
        all_are_fetched(node, KEYS, 65536)
    assert {member["node_id"] for member in other.call("members")} == {"host", "other"}
    assert owner.call("counters")["p2pkv_attach_stored_pages_total"] == len(KEYS)
    assert cluster.start("third").call("exists", keys=[*KEYS, "none"])["hits"] == [1] * len(KEYS) + [0]


def test_an_engine_reads_what_others_published(cluster: Cluster, path: str) -> None:
    owner, other = host(cluster, path), cluster.start("other")
    cluster.meet(owner, other)
    assert all(other.call("publish", keys=KEYS, nbytes=65536))
    reader = engine(cluster, path)
    all_are_fetched(reader, KEYS, 65536)


def test_pages_outlive_the_engine_that_published_them(cluster: Cluster, path: str) -> None:
    owner = host(cluster, path)
    first = engine(cluster, path)
    assert all(first.call("publish", keys=KEYS, nbytes=65536))
    first.kill()
    successor = engine(cluster, path)
    answer = successor.call("fetch", keys=KEYS, nbytes=65536)
    assert answer["hits"] == [1] * len(KEYS)
    assert answer["wrong"] == []
    eventually(lambda: owner.call("counters")["p2pkv_attached_engines"] == 1, 5.0)


def test_a_node_that_stood_still_forgets_what_its_engine_has_closed_meanwhile(
    cluster: Cluster, path: str
) -> None:
    most = 1024  # memories that a node maps for an engine; its socket has room for some 300 messages
    owner = host(cluster, path)
    attachment = _native.Attachment.open(path.removeprefix("unix:"), 20.0)
    fd = os.memfd_create("memory", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SHRINK)
    waiting = threading.Thread(target=attachment.wait_gone, args=(3600.0,))
    waiting.start()
    try:
        numbers = [attachment.share(4096, fd, 20.0)[0] for _ in range(most)]
        assert all(numbers)
        owner.stop()
        for number in numbers:
            attachment.forget(number)
        owner.resume()
        for _ in range(most):
            eventually(lambda: attachment.share(4096, fd, 20.0)[0] > 0, 20.0)
    finally:
        attachment.close()
        waiting.join()
        os.close(fd)


def test_an_engine_whose_node_is_stopped_gives_up_at_its_deadline(cluster: Cluster, path: str) -> None:
    owner = host(cluster, path)
    writer = engine(cluster, path, in_memfd=True)
    assert all(writer.call("publish", keys=KEYS, nbytes=65536))
    assert all(writer.call("fetch", keys=KEYS, nbytes=65536)["hits"])
    owner.stop()
    with returns_within(2.0):
        assert not any(writer.call("publish", keys=["late"], nbytes=65536, timeout=0.3))
    # what is known to lie there needs nobody
    answer = writer.call("fetch", keys=KEYS, nbytes=65536, timeout=0.5)
    assert answer["hits"] == [1] * len(KEYS)
    assert answer["wrong"] == []
    owner.resume()
    eventually(lambda: all(writer.call("publish", keys=["again"], nbytes=65536)), 5.0)
    assert not any(writer.call("exists", keys=["late"])["hits"])


def test_an_engine_attaches_again_to_a_node_that_comes_back(cluster: Cluster, path: str) -> None:
    owner = host(cluster, path)
    writer = engine(cluster, path, in_memfd=True)
    assert all(writer.call("publish", keys=KEYS, nbytes=65536))
    owner.kill()
    assert not any(writer.call("publish", keys=["nobody"], nbytes=65536, timeout=0.3))
    answer = writer.call("fetch", keys=KEYS, nbytes=65536, timeout=0.5)
    assert answer["wrong"] == []
    host(cluster, path)
    eventually(lambda: all(writer.call("publish", keys=KEYS, nbytes=4096)), 5.0)
    all_are_fetched(writer, KEYS, 4096)


def test_a_bump_that_the_node_has_heard_of_holds_for_its_engines(cluster: Cluster, path: str) -> None:
    owner = host(cluster, path)
    writer, reader = engine(cluster, path), engine(cluster, path, "reader")
    assert all(writer.call("publish", keys=KEYS, nbytes=4096))
    assert all(reader.call("exists", keys=KEYS)["hits"])
    owner.call("bump")
    for one in (writer, reader):
        assert not any(one.call("exists", keys=KEYS)["hits"])
        assert not any(one.call("fetch", keys=KEYS, nbytes=4096)["hits"])


def test_what_an_engine_cannot_do_is_said(cluster: Cluster, path: str) -> None:
    host(cluster, path)
    one = engine(cluster, path)
    for command, arguments in (("retract", {"keys": KEYS}), ("clear", {}), ("drain", {"seconds": 1.0})):
        with pytest.raises(RefusedError, match="an attached engine can't"):
            one.call(command, **arguments)


def test_an_engine_without_a_node_says_what_to_do(cluster: Cluster, path: str) -> None:
    with pytest.raises(RefusedError, match="no node listens there; start one there"):
        engine(cluster, path)


def test_two_engines_of_one_id_are_two_engines(cluster: Cluster, path: str) -> None:
    owner = host(cluster, path)
    engines = [engine(cluster, path, "host") for _ in range(2)]  # and that of their node at that
    for number, one in enumerate(engines):
        assert all(one.call("publish", keys=[f"{key}-{number}" for key in KEYS], nbytes=4096))
    assert owner.call("counters")["p2pkv_attached_engines"] == 2


def test_two_nodes_do_not_share_a_path(cluster: Cluster, path: str) -> None:
    host(cluster, path)
    with pytest.raises(RefusedError, match="another node listens there"):
        cluster.start("second", attach_listen=path)


def test_a_node_that_engines_attach_to_is_not_attached_itself(path: str) -> None:
    command = [sys.executable, "-m", "p2pkv", "node", "--set", f"attach={path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "p2pkv node is what engines attach to, and can't be attached itself" in done.stderr


def test_engines_find_their_node_by_themselves_and_are_nodes_where_there_is_none(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv(
        "XDG_RUNTIME_DIR", str(tmp_path / "run")
    )  # which processes have that are started from here on
    alone = engine(cluster, "auto", "alone")
    owner = host(cluster, "auto")
    cluster.meet(owner, alone)
    first = engine(cluster, "auto")
    assert all(first.call("publish", keys=KEYS, nbytes=65536))
    first.kill()
    for node in (engine(cluster, "auto", "second"), alone, owner):
        all_are_fetched(node, KEYS, 65536)
    assert owner.call("counters")["p2pkv_attach_stored_pages_total"] == len(KEYS)
    assert {member["node_id"] for member in alone.call("members")} == {"host", "alone"}
    owner.kill()
    assert engine(cluster, "auto", "third").call("counters")["p2pkv_pool_pages"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_where_the_files_let_him_in(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory(prefix="p2pkv-") as folder:  # those of pytest are closed to others
        owner = host(cluster, f"unix:{folder}/s")
        assert _as_nobody(f"{folder}/s") == "PermissionError"
        os.chmod(folder, 0o711)
        assert _as_nobody(f"{folder}/s") == "PermissionError"
        os.chmod(f"{folder}/s", 0o666)
        assert _as_nobody(f"{folder}/s") == "hung up"  # the kernel says who he is
        assert owner.call("counters")["p2pkv_attach_refused_total"] == 1
        assert owner.call("counters")["p2pkv_attached_engines"] == 0
        assert all(engine(cluster, f"unix:{folder}/s").call("publish", keys=KEYS, nbytes=4096))


def _as_nobody(path: str) -> str:
    """Say what becomes of another user's attempt to attach."""
    program = """
import os, socket, struct, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
    visitor.settimeout(30)
    try:
        visitor.connect(sys.argv[1])
        visitor.send(struct.pack("=IHHQQ", 0x48413250, 1, 1, 0, 0))
        print("hung up" if not visitor.recv(4096) else "let in")
    except (ConnectionResetError, BrokenPipeError):
        print("hung up")
    except OSError as error:
        print(type(error).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd="/",
    )
    return done.stdout.strip()
