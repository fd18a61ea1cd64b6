"""What a node's disk has evicted is not told to exist for long, nor what it has got meanwhile to be nowhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from cluster import eventually
from p2pkv import Config, Node
from p2pkv._native import FaultyFiles, FileCall
from p2pkv.disk.tier import DiskTier
from p2pkv.page import HAS_DISK, RESIDENT, Keys, Locations

NBYTES = 65536
N = 8
GONE = [f"gone-{i}" for i in range(N)]


class FaultyNode(Node):
    """A node whose disk goes through ``_disk_faults``."""


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> FaultyFiles:
    """Return what makes the owner's disk fail."""
    faults = FaultyFiles()
    monkeypatch.setattr(FaultyNode, "_disk_faults", faults)
    return faults


@pytest.fixture
def nodes(tmp_path: Path, faults: FaultyFiles) -> Iterator[tuple[Node, Node]]:
    """Start an owner with a small disk, and a reader."""
    with ExitStack() as undo:
        owner = undo.enter_context(
            FaultyNode.start(
                Config(
                    node_id="owner",
                    pool_size="4MiB",
                    buffer_size=0,
                    disk_size="8MiB",
                    disk_path=str(tmp_path / "disk"),
                )
            )
        )
        address = next(member.address for member in owner.members() if member.node_id == "owner")
        reader = undo.enter_context(
            Node.start(Config(node_id="reader", pool_size="4MiB", buffer_size=0, join=address))
        )
        eventually(lambda: len(owner.members()) == len(reader.members()) == 2, 10.0)
        undo.callback(faults.heal)
        yield owner, reader


def tier_of(node: Node) -> DiskTier:
    assert node._parts.caching is not None
    tier = node._parts.caching.tier
    assert tier is not None
    return tier


def ids_of(node: Node, keys: list[str]) -> Keys:
    return node._cache.hash(keys)[1]


def believe(owner: Node, locations: Locations) -> None:
    """Put entries that nothing lies behind, as when what took them out was lost."""
    assert owner._parts.caching is not None
    told = owner._parts.caching.directory.put(ids_of(owner, GONE), locations, time.monotonic() + 5.0)
    assert told.all()


def cold(owner: Node) -> Locations:
    locations = tier_of(owner).on_disk(N)
    locations["length"] = NBYTES
    return locations


def resident(owner: Node) -> Locations:
    locations = cold(owner)
    locations["flags"] = RESIDENT | HAS_DISK
    locations["offset"] = tier_of(owner)._pool.data_offset
    locations["generation"] = 4  # nothing is published, so that every word is odd
    return locations


def test_a_node_does_not_believe_the_directory_of_its_own_pages(nodes: tuple[Node, Node]) -> None:
    owner, reader = nodes
    believe(owner, cold(owner))
    assert not owner.exists(GONE).any()
    # and has it taken out
    eventually(lambda: not reader.exists(GONE).any(), 5.0)


def test_what_a_peer_is_told_of_in_vain_is_taken_out(nodes: tuple[Node, Node]) -> None:
    owner, reader = nodes
    believe(owner, cold(owner))
    eventually(lambda: not reader.exists(GONE).any(), 5.0)


def test_what_a_peer_fetches_in_vain_is_taken_out_wherever_it_was_said_to_be(
    nodes: tuple[Node, Node],
) -> None:
    owner, reader = nodes
    memory = np.zeros((N, NBYTES), np.uint8)
    reader.register_memory(memory)
    believe(owner, resident(owner))
    assert reader.exists(GONE).all()  # only a read shows that it is not so
    assert not reader.fetch(GONE, memory).any()
    eventually(lambda: not reader.exists(GONE).any(), 5.0)


def test_what_is_evicted_while_it_is_written_is_told_of_when_it_is_on_disk(
    nodes: tuple[Node, Node], faults: FaultyFiles
) -> None:
    owner, reader = nodes
    memory = np.zeros((64, NBYTES), np.uint8)
    owner.register_memory(memory)
    faults.hang(FileCall.WRITE)
    owner.publish(["page"], memory[:1])
    # the writer has copied it, so that no pin keeps it in the pool
    eventually(lambda: tier_of(owner).readings()["p2pkv_disk_queued_bytes"] == 0, 5.0)
    owner.publish([f"other-{i}" for i in range(64)], memory)
    assert not owner.exists(["page"]).any()
    eventually(lambda: not reader.exists(["page"]).any(), 5.0)
    faults.heal()
    eventually(lambda: bool(reader.exists(["page"]).all()), 5.0)
