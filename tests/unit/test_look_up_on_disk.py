"""Who has the pages of a prompt on disk is asked for all of them, as who has them in memory is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from look_ups import N_PAGES, NAMES, Reader, all_by, drawn, published
from p2pkv import Config, Node
from p2pkv.control.wire import HEADER, Kind, ReplyStatus, pack_request
from p2pkv.directory.view import node_key
from p2pkv.disk.tier import DiskTier
from p2pkv.page import RESIDENT, Keys, as_bytes
from simulated_directory_nodes import BOOT, DirectoryNodes


@pytest.fixture
def nodes() -> Iterator[DirectoryNodes]:
    nodes = DirectoryNodes(*NAMES, "reader")
    yield nodes
    nodes.close()


@pytest.fixture
def move_to_disk(nodes: DirectoryNodes, tmp_path: Path) -> Iterator[Callable[[str, Keys], DiskTier]]:
    """Have what a node published lie on its disk alone, and the directory know it."""
    with ExitStack() as tiers:

        def move(node_id: str, keys: Keys) -> DiskTier:
            node = nodes.nodes[node_id]
            config = Config(
                node_id=node_id, namespace="ns", disk_path=str(tmp_path / node_id), disk_size="64MiB"
            )
            tier = DiskTier(config, node.pool, own_key=node_key(node_id), boot=BOOT)
            tiers.callback(tier.close)
            tiers.callback(node.shard.serve_held, None)
            tier.note_published(keys)
            assert tier.flush(60.0)
            assert node.pool.purge() == len(keys)
            _, where = tier.locate(keys)
            sequence = node.directory.next_sequence()
            assert node.directory.put(keys, where, node.clock.now + 5.0, sequence=sequence).all()
            node.shard.serve_held(node.pool.native, None, tier.native)
            return tier

        yield move


def test_a_prompt_on_one_disk_asks_the_owners_of_its_first_page_and_that_node(
    nodes: DirectoryNodes, move_to_disk: Callable[[str, Keys], DiskTier]
) -> None:
    keys = published(nodes, "n07")
    tier = move_to_disk("n07", keys)
    reader = Reader(nodes)
    found, where = reader.look_up(keys)
    assert all_by(found, where, "n07")
    assert (as_bytes(where) == as_bytes(tier.locate(keys)[1])).all()
    assert reader.control.who(Kind.HELD) == {"n07"}
    assert reader.control.who() <= {"n07", *reader.owners_of(keys[:1])}


def test_a_prompt_that_is_half_in_memory_is_asked_of_its_node_alone(
    nodes: DirectoryNodes, move_to_disk: Callable[[str, Keys], DiskTier]
) -> None:
    keys = drawn(nodes, N_PAGES)
    nodes.nodes["n07"].publish_keys(keys[40:])
    move_to_disk("n07", keys[40:])
    nodes.nodes["n07"].publish_keys(keys[:40])
    reader = Reader(nodes)
    found, where = reader.look_up(keys)
    assert all_by(found, where, "n07")
    assert ((where["flags"] & RESIDENT != 0) == (np.arange(N_PAGES) < 40)).all()
    assert reader.control.who() <= {"n07", *reader.owners_of(keys[:1])}


def test_who_has_a_page_in_memory_is_named_before_who_has_it_on_disk(
    nodes: DirectoryNodes, move_to_disk: Callable[[str, Keys], DiskTier]
) -> None:
    """A page on disk is no further holder either: a fetch reads memory there."""
    keys = published(nodes, "n07")
    move_to_disk("n07", keys)
    nodes.nodes["n07"].publish_keys(keys[:50])
    nodes.nodes["n11"].publish_keys(keys[:1])
    move_to_disk("n11", keys[:1])
    nodes.nodes["n11"].publish_keys(keys[50:])
    reader = Reader(nodes)
    found, where = reader.look_up(keys)
    assert found.all()
    assert (where["flags"] & RESIDENT != 0).all()
    first_half = np.arange(N_PAGES) < 50
    assert (where["owner"] == np.where(first_half, node_key("n07"), node_key("n11"))).all()
    assert not any(len(reader.others.of(key[None])) for key in keys[1:])
    assert len(reader.control.who()) <= 4


def test_a_holder_whose_disk_is_busy_costs_no_page(
    nodes: DirectoryNodes, move_to_disk: Callable[[str, Keys], DiskTier]
) -> None:
    """It says nothing of its disk, as who knows no such question; the owners know where the pages are."""
    keys = published(nodes, "n07")
    move_to_disk("n07", keys)
    nodes.nodes["n07"].shard.serve_held(nodes.nodes["n07"].pool.native)
    reader = Reader(nodes)
    found, where = reader.look_up(keys)
    assert all_by(found, where, "n07")


def test_a_node_says_what_it_has_on_disk(tmp_path: Path) -> None:
    config = Config(
        node_id="n", pool_size="1MiB", buffer_size=0, disk_path=str(tmp_path / "disk"), disk_size="64MiB"
    )
    with Node.start(config) as node:
        memory = np.zeros((8, 4096), np.uint8)
        keys = [f"page {i}" for i in range(8)]
        with node.register_memory(memory):
            assert node.publish(keys, memory).all()
        caching = node._parts.caching
        assert caching is not None
        assert caching.tier is not None
        assert caching.tier.flush(60.0)
        caching.pool.purge()
        ids = caching.cache.hash(keys)[1]
        boot = int(caching.tier.locate(ids)[1]["boot"][0])
        asked = pack_request(Kind.HELD, 1, boot=0, count=len(ids), body=ids.tobytes())
        reply = node._parts.control.shard.answer(asked, boot)
    *_, count, status = HEADER.unpack_from(reply)
    assert (count, status) == (len(ids), ReplyStatus.OK)
    assert reply[HEADER.size : HEADER.size + len(ids)] == b"\1" * len(ids)
