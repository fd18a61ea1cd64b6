"""Look-ups over the control socket, as where there is no channel: all holders are named, if the owner knows how."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from p2pkv import _native
from p2pkv.control.wire import HEADER, MAGIC, REPLY, VERSION, Kind, ReplyStatus
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.view import View, node_key
from p2pkv.page import as_locations
from p2pkv.testing.simulated_directory import NoChannels, SimulatedControl
from simulated_directory_nodes import DirectoryNodes

N_PAGES = 64


class FromBefore:
    """A shard of a node that does not know LOCATE."""

    def __init__(self, shard: _native.Shard) -> None:
        self._shard = shard

    def answer(self, message: bytes, boot: int) -> bytes:
        _, _, kind, request_id, _, count, _ = HEADER.unpack_from(message)
        if kind != Kind.LOCATE:
            return self._shard.answer(message, boot)
        return HEADER.pack(MAGIC, VERSION, kind | REPLY, request_id, boot, count, ReplyStatus.MALFORMED)


class Reader:
    """A node with no page, which has asked nobody yet."""

    def __init__(self, nodes: DirectoryNodes, *, are_from_before: bool) -> None:
        def reach(address: str) -> tuple[_native.Shard, int] | None:
            found = nodes.reach(address)
            return (FromBefore(found[0]), found[1]) if found and are_from_before else found  # type: ignore[return-value]

        node = nodes.nodes["reader"]
        self.clock = node.clock
        self.shard = node.shard
        self.control = SimulatedControl(reach, self.clock)
        self.others = _native.OtherHolders(1 << 16)  # its sets have four places: so few keys fill none
        self.directory = DirectoryClient(
            own_key=node_key("reader"),
            shard=self.shard,
            client=self.control,
            channels=NoChannels(),
            replicas=1,
            metrics=node.metrics,
            clock=self.clock,
            others=self.others,
        )
        self.directory.set_view(View(each.member for each in nodes.nodes.values()))

    def look_up(self, keys: np.ndarray) -> np.ndarray:
        found, _ = self.directory.get(keys, self.clock.now + 5.0)
        return found


@pytest.fixture
def nodes() -> Iterator[DirectoryNodes]:
    nodes = DirectoryNodes("a", "b", "reader")
    yield nodes
    nodes.close()


def _published(nodes: DirectoryNodes) -> np.ndarray:
    keys = nodes.nodes["a"].publish(N_PAGES)
    nodes.nodes["b"].publish_keys(keys)
    nodes.run(5.0)
    return keys


def test_every_holder_is_named_at_once(nodes: DirectoryNodes) -> None:
    keys = _published(nodes)
    reader = Reader(nodes, are_from_before=False)
    assert reader.look_up(keys).all()
    assert all(reader.others.of(keys[i : i + 1]).size for i in range(N_PAGES))
    assert reader.control.n_records[Kind.LOCATE] > 0
    assert reader.control.n_records[Kind.GET] == 0


def test_nodes_from_before_are_asked_as_before(nodes: DirectoryNodes) -> None:
    keys = _published(nodes)
    reader = Reader(nodes, are_from_before=True)
    assert reader.look_up(keys).all()
    assert reader.control.n_records[Kind.LOCATE] > 0


def test_a_page_is_found_whose_first_holder_is_gone(nodes: DirectoryNodes) -> None:
    keys = _published(nodes)
    reader = Reader(nodes, are_from_before=False)
    reader.directory.set_view(View(nodes.nodes[name].member for name in ("b", "reader")))
    found, locations = reader.directory.get(keys, reader.clock.now + 5.0)
    assert reader.control.n_records[Kind.LOCATE] > 0, "this node knew all by itself: the test proves nothing"
    assert found.all()
    assert (as_locations(locations)["owner"] == node_key("b")).all()
