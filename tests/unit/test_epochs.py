"""A bump: who is told, who hears later, what is kept, what is refused. The hunt `epochs` looks for pages of before."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zmq

from cluster import eventually
from joined_nodes import joined_nodes
from p2pkv import ClosedError, Config, Node, UsageError, _native
from p2pkv.control.secret import ClusterKeys
from p2pkv.control.sockets import ControlClient, ControlServer, Request
from p2pkv.control.wire import Kind, ReplyStatus, pack_epochs, unpack_epochs
from p2pkv.directory import epochs
from p2pkv.directory.epochs import EpochKeeper
from p2pkv.directory.view import Member, View
from p2pkv.disk import small_file
from p2pkv.disk.epochs_file import EpochsFile
from p2pkv.page import Namespace, name_digest, scopes
from p2pkv.parts.node import NodeParts
from p2pkv.testing.lateness import returns_within
from p2pkv.testing.ports import free_port

if TYPE_CHECKING:
    from typing_extensions import Self

PAGE = 4096
KEYS = ["a", "b", "c"]
BOOT = 5


@pytest.fixture
def start() -> Iterator[Callable[..., Node]]:
    with joined_nodes() as start:
        yield start


def filled(node: Node, value: int = 7) -> np.ndarray:
    memory = np.full((len(KEYS), PAGE), value, np.uint8)
    node.register_memory(memory)
    return memory


def test_after_a_bump_nobody_finds_what_was_published_before(start: Callable[..., Node]) -> None:
    one, other = start("one"), start("other")
    memory, there = filled(one), filled(other, 0)
    assert one.publish(KEYS, memory).all()
    assert other.fetch(KEYS, there).all()
    bump = other.bump()
    assert (bump.heard, bump.unreached) == (("one",), ())
    assert one.epoch == other.epoch == bump.epoch > 0
    for node, into in ((one, memory), (other, there)):
        assert not node.exists(KEYS).any()
        assert not node.fetch(KEYS, into).any()
    assert one.counters()["p2pkv_pool_pages"] == 0
    assert one.counters()["p2pkv_bumps_total"] == 1
    assert one.publish(KEYS, memory).all()
    assert other.fetch(KEYS, there).all()


def test_pages_of_an_epoch_that_is_over_are_not_published(start: Callable[..., Node]) -> None:
    node = start("one")
    memory, before = filled(node), node.epoch
    node.bump()
    assert not node.publish(KEYS, memory, epoch=before).any()
    assert not node.exists(KEYS).any()
    assert node.counters()['p2pkv_unpublished_pages_total{reason="epoch"}'] == len(KEYS)
    assert node.publish(KEYS, memory, epoch=node.epoch).all()


def test_a_bump_is_for_the_namespaces_below_it_and_for_no_others(start: Callable[..., Node]) -> None:
    below, beside = start("below", namespace="prod vllm model=m"), start("beside", namespace="production")
    for node in (below, beside):
        assert node.publish(KEYS, filled(node)).all()
    assert beside.bump("prod").heard == ("below",)
    assert not below.exists(KEYS).any()
    assert beside.exists(KEYS).all()


def test_a_node_that_starts_knows_of_bumps_before_it_finds_its_disk(
    start: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EpochKeeper, "met", lambda keeper, members: None)  # nobody tells it
    stays = start("stays")
    config = Config(
        node_id="away",
        pool_size="1MiB",
        buffer_size=0,
        disk_size="16MiB",
        disk_path=str(tmp_path / "disk"),
        join=[stays.address],
    )
    with Node.start(config) as away:
        assert away.publish(KEYS, filled(away)).all()
    epoch = stays.bump().epoch
    with Node.start(config) as away:
        assert away.epoch == epoch
        assert not away.fetch(KEYS, filled(away, 0)).any()


def test_what_was_published_since_a_bump_is_on_disk_after_a_restart_of_the_whole_cluster(
    tmp_path: Path,
) -> None:
    config = Config(
        node_id="one", pool_size="1MiB", buffer_size=0, disk_size="16MiB", disk_path=str(tmp_path / "disk")
    )
    with Node.start(config) as node:
        epoch = node.bump().epoch
        # a folder that a busy machine opens late is not waited for, and what was published before is not written
        eventually(lambda: node.counters()["p2pkv_disk_suspended"] == 0, 10.0)
        assert node.publish(KEYS, filled(node)).all()
        eventually(lambda: node.counters()["p2pkv_disk_stored_pages_total"] == len(KEYS), 10.0)
    with Node.start(config) as node:
        assert node.epoch == epoch
        memory = filled(node, 0)
        # the folder is looked through in the background
        eventually(lambda: bool(node.fetch(KEYS, memory).all()), 15.0)
        assert (memory == 7).all()


def test_a_bump_is_on_disk_when_it_returns(start: Callable[..., Node], tmp_path: Path) -> None:
    """So that a node that is killed then finds nothing of before in its next life, and knows the epoch."""
    disk = str(tmp_path / "disk")
    node = start(node_id="one", disk_size="16MiB", disk_path=disk)
    node.publish(KEYS, filled(node))
    assert node._parts.caching is not None
    tier = node._parts.caching.tier
    assert tier is not None
    for namespace in ("default", "another", "default"):
        epoch = node.bump(namespace, timeout=20.0).epoch
        known = _native.NamespaceEpochs()
        EpochsFile(disk, "one").read(known)
        assert dict(known.all())[name_digest(namespace)] == epoch
        assert tier.wait_cleared(0.0)


def test_a_bump_waits_for_a_disk_that_hangs_until_its_deadline(tmp_path: Path) -> None:
    class BreakableNode(Node):
        _disk_faults = _native.FaultyFiles()

    faults = BreakableNode._disk_faults
    config = Config(node_id="one", pool_size="1MiB", disk_size="16MiB", disk_path=str(tmp_path / "disk"))
    with BreakableNode.start(config) as node:
        node.publish(KEYS, filled(node))
        faults.hang(_native.FileCall.WRITE)
        try:
            with returns_within(0.3 + 0.1):
                bump = node.bump(timeout=0.3)
        finally:
            faults.heal()
        assert bump.unreached == ()


def test_a_bump_waits_for_a_slow_disk_for_as_long_as_its_deadline_allows(
    start: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_file, "_WAIT_S", 0.01)
    disk, fsync, n_bumps = str(tmp_path / "disk"), os.fsync, 3
    node = start(node_id="one", disk_size="16MiB", disk_path=disk)

    def slow(descriptor: int) -> None:
        fsync(descriptor)
        time.sleep(0.3)

    monkeypatch.setattr(small_file.os, "fsync", slow)
    for _ in range(n_bumps):
        epoch = node.bump("another", timeout=30.0).epoch
        known = _native.NamespaceEpochs()
        EpochsFile(disk, "one").read(known)
        assert dict(known.all())[name_digest("another")] == epoch


@pytest.mark.parametrize("hangs", ["file", "store"])
def test_a_node_is_closed_while_a_bump_waits_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    class BreakableNode(Node):
        _disk_faults = _native.FaultyFiles()

    config = Config(node_id="one", pool_size="1MiB", disk_size="16MiB", disk_path=str(tmp_path / "disk"))
    node = BreakableNode.start(config)
    node.publish(KEYS, filled(node))
    answers, fsync, waits = threading.Event(), os.fsync, threading.Event()

    def hang(descriptor: int) -> None:
        waits.set()
        answers.wait()
        fsync(descriptor)

    def bump() -> None:
        with pytest.raises(ClosedError):
            node.bump(timeout=600.0)
        ended.set()

    bumping, ended = threading.Thread(target=bump), threading.Event()
    if hangs == "file":
        monkeypatch.setattr(small_file.os, "fsync", hang)
    else:
        BreakableNode._disk_faults.hang(_native.FileCall.WRITE)
    bumping.start()
    try:
        if hangs == "file":
            assert waits.wait(30.0)
        node._parts.interrupt()
        assert ended.wait(30.0)
    finally:
        answers.set()
        BreakableNode._disk_faults.heal()
        bumping.join()
        node.close()


def test_bumps_on_a_disk_that_hangs_do_not_pile_up(
    start: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, fsync = threading.Event(), os.fsync
    node = start(node_id="one", disk_size="16MiB", disk_path=str(tmp_path / "disk"))

    def hang(descriptor: int) -> None:
        answers.wait()
        fsync(descriptor)

    def n_threads() -> int:
        return sum(thread.name == "p2pkv-small-file" for thread in threading.enumerate())

    monkeypatch.setattr(small_file.os, "fsync", hang)
    try:
        for _ in range(8):
            epoch = node.bump("another", timeout=0.01).epoch
        assert n_threads() <= 2  # one that hangs, and one that will write all that came meanwhile
    finally:
        answers.set()
    eventually(lambda: n_threads() == 0, 30.0)
    known = _native.NamespaceEpochs()
    EpochsFile(str(tmp_path / "disk"), "one").read(known)
    assert dict(known.all())[name_digest("another")] == epoch


def test_a_member_that_does_not_answer_is_named() -> None:
    with Plane(2) as plane:
        silent = Member("silent", BOOT, "127.0.0.1:9")
        keeper = EpochKeeper(plane.known, plane.client, lambda: [*plane.members, silent])
        bump = keeper.bump("x", time.monotonic() + 0.3)
        assert (bump.heard, bump.unreached) == (("n0", "n1"), ("silent",))


@pytest.fixture
def long_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have who was given up and lives answer in time, however busy the machine is."""
    monkeypatch.setattr(epochs, "MOMENT_S", 3.0)


@pytest.mark.usefixtures("long_moment")
def test_those_that_were_given_up_of_late_are_told_as_well() -> None:
    with Plane(3) as plane:
        lives, dead = plane.members[2], Member("dead", BOOT, f"127.0.0.1:{free_port()}")
        keeper = EpochKeeper(
            plane.known, plane.client, lambda: plane.members[:2], given_up=lambda: [dead, lives]
        )
        bump = keeper.bump("x", time.monotonic() + 60)
        assert (bump.heard, bump.unreached) == (("n0", "n1", "n2"), ())
        assert {one.own for one in plane.epochs} == {bump.epoch}


@pytest.mark.usefixtures("long_moment")
def test_one_that_was_given_up_is_told_where_nobody_else_is_left() -> None:
    with Plane(1) as plane:
        keeper = EpochKeeper(plane.known, plane.client, tuple, given_up=lambda: plane.members)
        assert keeper.bump("x", time.monotonic() + 60).heard == ("n0",)


@pytest.mark.usefixtures("long_moment")
@pytest.mark.parametrize("is_member", [True, False], ids=["is given up", "comes back"])
def test_one_that_is_told_as_a_member_or_not_any_more_is_told(is_member: bool) -> None:
    """Whom the view and the given up know changes between the two questions for them."""
    with Plane(1) as plane:
        n_asked = 0

        def members() -> list[Member]:
            nonlocal n_asked
            n_asked += 1
            return plane.members if is_member == (n_asked == 1) else []

        def given_up() -> list[Member]:
            nonlocal n_asked
            n_asked += 1
            return plane.members if n_asked > 1 or not is_member else []

        keeper = EpochKeeper(plane.known, plane.client, members, given_up=given_up)
        assert keeper.bump("x", time.monotonic() + 60).heard == ("n0",)


def test_one_that_was_given_up_and_comes_back_meanwhile_is_waited_for() -> None:
    with Plane(1) as plane:
        back = Member("back", BOOT, f"127.0.0.1:{free_port()}")
        views = iter([plane.members])
        keeper = EpochKeeper(
            plane.known,
            plane.client,
            lambda: next(views, [*plane.members, back]),
            given_up=lambda: [back],
        )
        bump = keeper.bump("x", time.monotonic() + 1.0)
        assert (bump.heard, bump.unreached) == (("n0",), ("back",))


@pytest.mark.usefixtures("long_moment")
def test_a_node_tells_those_that_it_has_given_up(start: Callable[..., Node]) -> None:
    one, other = start("one"), start("other")
    eventually(lambda: len(one.members()) == 2, 30.0)
    of_one = one._parts
    assert isinstance(of_one, NodeParts)
    of_one._view_changed(of_one.membership.view(), View(m for m in one.members() if m.node_id == "one"))
    of_one.epochs._members = tuple
    assert one.bump().heard == ("other",)
    assert other.epoch == one.epoch


def test_64_nodes_hear_of_a_thousand_bumps() -> None:
    with Plane(64) as plane:
        keeper = EpochKeeper(plane.known, plane.client, lambda: plane.members)
        last = 0
        for _ in range(1000 // 64):
            for one in plane.epochs:
                bump = keeper.bump("x", time.monotonic() + 60)
                assert not bump.unreached
                assert one.own == bump.epoch > last
                last = bump.epoch
        assert {one.own for one in plane.epochs} == {last}


def test_a_bump_is_above_what_any_member_knows() -> None:
    with Plane(2) as plane:
        ahead = 2**61  # as of a clock that is wrong by years
        plane.epochs[1].raise_to([(name_digest("another"), ahead)])
        keeper = EpochKeeper(plane.known, plane.client, lambda: plane.members)
        assert keeper.bump("x", time.monotonic() + 60).epoch == ahead + 1
        assert [one.own for one in plane.epochs] == [ahead + 1, ahead + 1]


def test_above_the_last_epoch_there_is_none() -> None:
    with Plane(1) as plane:
        plane.known.raise_to([(name_digest("another"), plane.known.END - 1)])
        with pytest.raises(UsageError, match="beyond every clock"):
            EpochKeeper(plane.known, plane.client, lambda: plane.members).bump("x", time.monotonic() + 60)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"", 1),
        (bytes(23), 1),
        (bytes(25), 1),
        (bytes(24), 2),
        (bytes(24), 0),
        (struct.pack("<16sQ", b"x", 2**62), 1),
    ],
)
def test_what_no_node_could_have_said_is_refused(body: bytes, count: int) -> None:
    with Plane(1) as plane:
        reply = plane.client.ask(Request(plane.members[0].address, Kind.EPOCHS, body, count), 5.0)
        assert reply is not None
        assert reply.status is ReplyStatus.MALFORMED
        assert plane.epochs[0].all() == []


def test_epochs_are_told_as_documented() -> None:
    told = [(name_digest("default"), 7)]
    assert pack_epochs(told).hex() == name_digest("default").hex() + "0700000000000000"
    assert unpack_epochs(pack_epochs(told), 1) == told


def test_keys_without_a_bump_are_what_they_were_before_there_were_epochs() -> None:
    epochs = _native.NamespaceEpochs()
    namespace, without = Namespace("prod m", epochs), Namespace("prod m")
    first = namespace.hash(KEYS)
    assert (first == without.hash(KEYS)).all()
    epochs.raise_to([(name_digest("prod"), 3)])
    assert namespace.hash_in_epoch(KEYS)[0] == 3
    assert not (namespace.hash(KEYS) == first).all(axis=1).any()
    assert scopes("prod m") == [name_digest("prod"), name_digest("prod m")]


def test_a_damaged_file_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = _native.NamespaceEpochs()
    known.raise_to([(name_digest("x"), 7), (name_digest("y"), 8)])
    EpochsFile(str(tmp_path / "disk"), "n").write(known.all)
    path = tmp_path / "disk.epochs"
    good = path.read_bytes()
    read = _native.NamespaceEpochs()
    EpochsFile(str(tmp_path / "disk"), "n").read(read)
    assert read.all() == known.all()
    assert caplog.text == ""
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        read = _native.NamespaceEpochs()
        EpochsFile(str(tmp_path / "disk"), "n").read(read)
        assert read.all() == []
    assert "should no peer remember them" in caplog.text
    assert os.listdir(tmp_path) == ["disk.epochs"]


@pytest.mark.parametrize("name", ["", 3])
def test_a_namespace_without_a_name_is_refused(start: Callable[..., Node], name: object) -> None:
    with pytest.raises(UsageError, match="not empty"):
        start("one").bump(name)  # type: ignore[arg-type]


class Plane:
    """Control sockets of nodes that are nothing else, and somebody who asks them."""

    def __init__(self, n_nodes: int) -> None:
        public, private = zmq.curve_keypair()
        keys = ClusterKeys(public=public, private=private)
        self.contexts: list[zmq.Context[zmq.Socket[bytes]]] = []
        self.servers: list[ControlServer] = []
        self.epochs: list[_native.NamespaceEpochs] = []
        self.members: list[Member] = []
        for i in range(n_nodes):
            self.contexts.append(zmq.Context())
            self.epochs.append(_native.NamespaceEpochs())
            self.epochs[-1].follow(scopes("x"))
            server = ControlServer(self.contexts[-1], keys, "127.0.0.1:0", _native.Shard(64), self.epochs[-1])
            server.start()
            server.loop.announce(i + 1, BOOT)
            self.servers.append(server)
            self.members.append(Member(f"n{i}", BOOT, server.address))
        self.known = _native.NamespaceEpochs()
        self.contexts.append(zmq.Context())
        self.client = ControlClient(self.contexts[-1], keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.client.close()
        for server in self.servers:
            server.close()
        for context in self.contexts:
            context.term()
