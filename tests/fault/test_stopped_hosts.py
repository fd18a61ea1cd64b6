"""A host's node that is stopped hears of no bump; its engines, who read its memory without asking, must not believe it.

What tells engines of bumps behind the scenes is switched off here: each call has to find out by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cluster import Cluster, NodeProcess, all_are_fetched, eventually
from p2pkv import Config, Node, SharedRegion
from pages import fill, wrong
from patience import PATIENCE

KEYS = [f"page-{i}" for i in range(8)]
NBYTES = 4096


class Host(NamedTuple):
    """A host's node in a process, an engine that is attached to it, and a node of another host."""

    node: NodeProcess
    engine: Node
    other: Node
    rows: np.ndarray

    def n_found(self) -> int:
        """Have the engine fetch; a page that it finds is whole."""
        outcomes = self.engine.fetch(KEYS, self.rows, timeout=5.0)
        assert wrong(self.rows, KEYS, outcomes) == []
        return int(np.count_nonzero(outcomes))


@pytest.fixture
def host(cluster: Cluster, tmp_path: Path) -> Iterator[Host]:
    (tmp_path / "host").mkdir(mode=0o700)
    path = f"unix:{tmp_path}/host/s"
    node = cluster.start("host", attach_listen=path)
    assert all(node.call("publish", keys=KEYS, nbytes=NBYTES))
    with ExitStack() as undo:
        other = undo.enter_context(Node.start(Config(node_id="other", join=[cluster.join], pool_size="1MiB")))
        engine = undo.enter_context(Node.start(Config(node_id="engine", attach=path)))
        rows = np.zeros((len(KEYS), NBYTES), np.uint8)
        engine.register_memory(rows)
        eventually(lambda: len(engine.members()) == len(other.members()) == 2, 10.0)
        engine._parts.epochs.close()
        engine._parts.following.close()
        found = Host(node, engine, other, rows)
        eventually(lambda: found.n_found() == len(KEYS), 10.0)
        # One that was given up a moment ago, on a busy machine, is waited for by no bump before it has heard of that.
        eventually(lambda: {member.condition for member in other.members()} == {"ALIVE"}, 10.0)
        yield found


def test_a_page_of_before_a_bump_is_not_found_while_the_node_is_stopped(host: Host) -> None:
    host.node.stop()
    bump = host.other.bump(timeout=60.0)
    assert (bump.heard, bump.unreached) == ((), ("host",))  # it has returned because the node was given up
    assert host.n_found() == 0
    assert not host.engine.exists(KEYS, timeout=5.0).any()
    assert not host.engine.whereabouts(KEYS, timeout=5.0).outcomes.any()
    assert host.engine.epoch == host.other.epoch


def test_nor_when_it_goes_on_and_has_heard_of_nothing_yet(host: Host) -> None:
    host.node.stop()
    host.other.bump(timeout=60.0)
    host.node.resume()
    assert host.node.call("members")  # it runs
    assert host.n_found() == 0
    eventually(lambda: not any(host.node.call("exists", keys=KEYS)["hits"]), 10.0)  # by now it has heard
    assert host.n_found() == 0
    all_are_again(host)


def all_are_again(host: Host) -> None:
    """Look that the node is what engines go by once more."""
    assert all(host.node.call("publish", keys=KEYS, nbytes=NBYTES))
    all_are_fetched(host.node, KEYS, NBYTES)
    attachment = host.engine._parts.own_host.attachment
    eventually(lambda: attachment.is_believed, 10.0)
    eventually(lambda: host.n_found() == len(KEYS), 10.0)


def test_what_a_stopped_node_has_is_found_while_others_say_that_nothing_was_bumped(host: Host) -> None:
    host.node.stop()
    attachment = host.engine._parts.own_host.attachment
    eventually(lambda: not attachment.is_believed, 10.0)
    # A member that is asked may be late on a busy machine, and a miss is no fault.
    eventually(lambda: host.n_found() == len(KEYS), 10.0)
    host.node.resume()
    all_are_again(host)


def test_what_a_stopped_node_has_is_found_where_there_is_nobody_else(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "host").mkdir(mode=0o700)
    path = f"unix:{tmp_path}/host/s"
    node = cluster.start("host", attach_listen=path)
    assert all(node.call("publish", keys=KEYS, nbytes=NBYTES))
    with Node.start(Config(node_id="engine", attach=path)) as engine:
        rows = np.zeros((len(KEYS), NBYTES), np.uint8)
        engine.register_memory(rows)
        node.stop()
        attachment = engine._parts.own_host.attachment
        eventually(lambda: not attachment.is_believed, 10.0)
        assert engine.fetch(KEYS, rows, timeout=5.0).all()
        assert wrong(rows, KEYS, np.ones(len(KEYS))) == []
        node.resume()


def test_memory_that_the_node_is_asked_to_map_in_vain_is_not_mapped_in_the_end(host: Host) -> None:
    attachment = host.engine._parts.own_host.attachment
    region = SharedRegion.create(1 << 20)
    before = host.node.call("counters")["p2pkv_attached_memory_bytes"]
    host.node.stop()
    assert attachment.share(region.nbytes, region.fd, 0.1) == (0, "the host's node does not answer")
    host.node.resume()
    number, problem = attachment.share(
        4096, region.fd, 30.0 * PATIENCE
    )  # it has heard of the other before this
    assert (problem, host.node.call("counters")["p2pkv_attached_memory_bytes"]) == ("", before + 4096)
    attachment.forget(number)


class Guests:
    """A page of the other node lies in the host's pool because the engine reads it often; members are told nothing."""

    def __init__(self, cluster: Cluster, path: str, undo: ExitStack) -> None:
        self.node = cluster.start("host", attach_listen=path, hot_share=0.25)
        config = Config(node_id="other", join=[cluster.join], pool_size="1MiB", deadline=60.0)
        self.other = undo.enter_context(Node.start(config))
        third = undo.enter_context(Node.start(Config(node_id="third", join=[cluster.join], pool_size="1MiB")))
        self.engine = undo.enter_context(Node.start(Config(node_id="engine", attach=path)))
        self.rows = np.zeros((len(KEYS), NBYTES), np.uint8)
        self.engine.register_memory(self.rows)
        nodes = (self.engine, self.other, third)
        eventually(lambda: {len(node.members()) for node in nodes} == {3}, 10.0)
        published = np.zeros_like(self.rows)
        fill(published, KEYS)
        self.other.register_memory(published)
        assert self.other.publish(KEYS, published).all()
        self.engine._parts.epochs.close()
        self.engine._parts.following.close()
        eventually(self.is_served_here, 60.0)

    def n_found(self) -> int:
        outcomes = self.engine.fetch(KEYS, self.rows, timeout=5.0)
        assert wrong(self.rows, KEYS, outcomes) == []
        return int(np.count_nonzero(outcomes))

    def n_guests_found(self) -> float:
        return self.engine.counters()["p2pkv_fetched_guest_pages_total"]

    def is_served_here(self) -> bool:
        before = self.n_guests_found()
        self.n_found()
        return self.n_guests_found() == before + len(KEYS)


@pytest.fixture
def guests(cluster: Cluster, tmp_path: Path) -> Iterator[Guests]:
    (tmp_path / "host").mkdir(mode=0o700)
    with ExitStack() as undo:
        yield Guests(cluster, f"unix:{tmp_path}/host/s", undo)


def test_a_guest_that_was_taken_back_is_not_found_while_its_holder_is_stopped(guests: Guests) -> None:
    guests.node.stop()
    assert guests.other.retract(KEYS).all()  # has returned because the node was given up
    assert guests.other.counters()["p2pkv_unheard_take_backs_total"] == 0
    before = guests.n_guests_found()
    for _ in range(5):
        assert guests.n_found() == 0
    assert guests.n_guests_found() == before


def test_nor_when_that_goes_on_and_has_not_heard_of_it_yet(guests: Guests) -> None:
    guests.node.stop()
    assert guests.other.retract(KEYS[:4]).all()
    guests.node.resume()
    pool = guests.engine._parts.own_host.pool

    def is_believed_again() -> bool:
        assert not guests.engine.fetch(KEYS[:4], guests.rows[:4], timeout=5.0).any()
        return bool(pool.get().are_guests_believed)

    eventually(is_believed_again, 60.0)
    assert not guests.engine.fetch(KEYS[:4], guests.rows[:4], timeout=5.0).any()
