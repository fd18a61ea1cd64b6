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
from pages import wrong
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
