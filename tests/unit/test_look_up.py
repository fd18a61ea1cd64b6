"""In a cluster of many members a prompt's pages are asked of who has the first of them, and of nobody in vain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from look_ups import N_NODES, N_PAGES, NAMES, TIMEOUT_S, Reader, all_by, drawn, published
from p2pkv import _native
from p2pkv.control.sockets import Request
from p2pkv.control.wire import HEADER, MAGIC, REPLY, VERSION, Kind, ReplyStatus
from p2pkv.directory.asking import SILENT_OWNER_S
from p2pkv.directory.view import node_key
from p2pkv.page import row_pieces
from p2pkv.pool import Pool
from simulated_directory_nodes import BOOT, DirectoryNodes


@pytest.fixture
def nodes() -> Iterator[DirectoryNodes]:
    nodes = DirectoryNodes(*NAMES, "reader")
    yield nodes
    nodes.close()


def test_a_prompt_of_one_node_asks_the_owners_of_its_first_page_and_that_node(nodes: DirectoryNodes) -> None:
    keys = published(nodes, "n07")
    reader = Reader(nodes)
    found, where = reader.look_up(keys)
    assert all_by(found, where, "n07")
    assert reader.control.who(Kind.HELD) == {"n07"}
    assert reader.control.who() <= {"n07", *reader.owners_of(keys[:1])}
    assert reader.node.metrics.looked_up_pages.labels("holders").value == N_PAGES


def test_a_prompt_of_two_nodes_asks_both_and_nobody_else(nodes: DirectoryNodes) -> None:
    first, second = published(nodes, "n07", 50), published(nodes, "n11", N_PAGES - 50)
    reader = Reader(nodes)
    found, where = reader.look_up(np.concatenate([first, second]))
    assert found.all()
    assert (where["owner"] == np.repeat([node_key("n07"), node_key("n11")], [50, N_PAGES - 50])).all()
    assert reader.control.who(Kind.HELD) == {"n07", "n11"}
    assert (
        len(reader.control.who()) <= 6
    )  # both owners of a page are asked at once where no channel leads to them


def test_pages_of_all_are_found_all_the_same(nodes: DirectoryNodes) -> None:
    keys = np.concatenate([published(nodes, name, 3) for name in NAMES])
    reader = Reader(nodes)
    found, _ = reader.look_up(keys)
    assert found.all()


def test_what_nobody_has_is_asked_of_two_owners_if_only_leading_pages_count(nodes: DirectoryNodes) -> None:
    keys = drawn(nodes, N_PAGES)
    reader = Reader(nodes)
    found, _ = reader.look_up(keys, leading=True)
    assert not found.any()
    assert reader.control.who() <= set(reader.owners_of(keys[:1]))
    reader.control.asked.clear()
    found, _ = reader.look_up(keys)
    assert not found.any()
    assert len(reader.control.who()) > N_NODES // 2


def test_leading_pages_are_all_found_and_none_behind_the_gap_has_to_be(nodes: DirectoryNodes) -> None:
    gap = drawn(nodes, 1)
    before, behind = published(nodes, "n07", 60), published(nodes, "n11", 60)
    reader = Reader(nodes)
    found, _ = reader.look_up(np.concatenate([before, gap, behind]), leading=True)
    assert found[:60].all()
    assert not found[60]
    assert len(reader.control.who()) <= 6
    found, _ = reader.look_up(np.concatenate([before, gap, behind]))
    assert found[:60].all()
    assert found[61:].all()


def test_a_holder_that_stands_still_costs_a_moment_and_no_page(nodes: DirectoryNodes) -> None:
    keys = published(nodes, "n07")
    nodes.nodes["n07"].is_stopped = True
    reader = Reader(nodes)
    began = reader.node.clock.now
    found, where = reader.look_up(keys)
    assert all_by(found, where, "n07")
    assert reader.node.clock.now - began < 4 * SILENT_OWNER_S


def test_a_holder_that_stands_still_leaves_most_of_a_short_call(nodes: DirectoryNodes) -> None:
    keys = published(nodes, "n07")
    nodes.nodes["n07"].is_stopped = True
    reader = Reader(nodes)
    found, _ = reader.look_up(keys, timeout=0.02)
    at_others = np.array(["n07" not in reader.owners_of(key[None]) for key in keys])
    assert found[at_others].all()


def test_owners_that_stand_still_prove_nothing(nodes: DirectoryNodes) -> None:
    keys = published(nodes, "n07")
    reader = Reader(nodes)
    silent = set(reader.owners_of(keys[:1])) - {"reader", "n07"}
    for name in silent:
        nodes.nodes[name].is_stopped = True
    found, _ = reader.look_up(keys, leading=True)
    owners = [set(reader.owners_of(key[None])) for key in keys]
    reachable = np.array([bool(each - silent) for each in owners])
    assert found[reachable].all()


def test_what_a_holder_has_no_more_is_found_at_who_has_it(nodes: DirectoryNodes) -> None:
    keys = published(nodes, "n07")
    nodes.nodes["n11"].publish_keys(keys[40:])
    before = nodes.nodes["n07"]
    before.pool.native.retract(keys[40:])
    before.directory.drop_gone(
        keys[40:], before.clock.now + TIMEOUT_S, sequence=before.directory.next_sequence()
    )
    reader = Reader(nodes)
    found, where = reader.look_up(keys)
    assert found.all()
    assert (where["owner"][40:] == node_key("n11")).all()
    assert reader.control.who(Kind.HELD) == {"n07", "n11"}


def test_pages_that_several_have_are_asked_of_these_and_all_are_known(nodes: DirectoryNodes) -> None:
    keys = published(nodes, "n07")
    nodes.nodes["n11"].publish_keys(keys)
    nodes.nodes["n23"].publish_keys(keys[:40])
    reader = Reader(nodes)
    found, where = reader.look_up(keys)
    assert found.all()
    assert reader.control.who(Kind.HELD) == {"n07", "n11", "n23"}
    assert len(reader.control.who()) <= 5
    for row, key in enumerate(keys):
        holders = {node_key("n07"), node_key("n11")} | ({node_key("n23")} if row < 40 else set())
        assert reader.holders_of(key[None], where[row]) == holders


def test_what_many_have_and_then_what_one_has_and_another_one_asks_few(nodes: DirectoryNodes) -> None:
    common, turns, later = (published(nodes, name, n) for name, n in (("n07", 40), ("n11", 40), ("n15", 48)))
    for name in NAMES[20:36]:
        nodes.nodes[name].publish_keys(common)
    reader = Reader(nodes)
    found, where = reader.look_up(np.concatenate([common, turns, later]))
    assert found.all()
    assert (where["owner"][40:80] == node_key("n11")).all()
    assert (where["owner"][80:] == node_key("n15")).all()
    assert len(reader.control.who(Kind.HELD)) <= 4 + 2
    assert len(reader.control.who()) <= 3 * 2 + 4 + 2


def test_pages_that_somebody_has_as_a_guest_are_asked_of_their_owners_who_name_all(
    nodes: DirectoryNodes,
) -> None:
    keys = published(nodes, "n07")
    nodes.nodes["n11"].publish_keys(keys)
    nodes.nodes["n11"].shard.serve_held(nodes.nodes["n15"].pool.native)  # as if its pages were another node's
    reader = Reader(nodes)
    found, where = reader.look_up(keys)
    assert found.all()
    assert reader.control.who(Kind.HELD) == {"n07", "n11"}
    assert len(reader.control.who()) > N_NODES // 2
    for row, key in enumerate(keys):
        assert reader.holders_of(key[None], where[row]) == {node_key("n07"), node_key("n11")}


def test_of_several_holders_one_that_stands_still_costs_a_moment_and_no_page(nodes: DirectoryNodes) -> None:
    keys = published(nodes, "n07")
    nodes.nodes["n11"].publish_keys(keys)
    nodes.nodes["n07"].is_stopped = True
    reader = Reader(nodes)
    began = reader.node.clock.now
    found, where = reader.look_up(keys)
    assert all_by(found[1:], where[1:], "n11")
    assert reader.node.clock.now - began < 3 * SILENT_OWNER_S
    assert len(reader.control.who()) <= 4


def test_a_holder_that_names_another_boot_costs_no_page(
    nodes: DirectoryNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = published(nodes, "n07")
    young = Pool(
        4 << 20, owner=node_key("n07"), boot=0
    )  # as before it knows the boot under which it is a member
    young.publish(keys, row_pieces(np.zeros((N_PAGES, 4096), np.uint8)))
    starting = _native.Shard(1 << 10)
    starting.serve_held(young.native)
    reader = Reader(nodes)

    def exchange(shard: _native.Shard, boot: int, request: Request, message: bytes) -> bytes:
        return (starting if request.kind is Kind.HELD else shard).answer(message, boot)

    monkeypatch.setattr(reader.control, "_exchange", exchange)
    found, where = reader.look_up(keys)
    assert all_by(found, where, "n07")
    young.release_memory()


def test_pages_that_lie_scattered_are_asked_of_their_owners(nodes: DirectoryNodes) -> None:
    keys = drawn(nodes, N_PAGES)
    for rank, name in enumerate(("n03", "n07", "n11", "n15")):
        nodes.nodes[name].publish_keys(keys[rank::4].copy())
    reader = Reader(nodes)
    found, _ = reader.look_up(keys)
    assert found.all()
    assert len(reader.control.who(Kind.HELD)) == 1


def test_an_owner_that_is_late_is_not_one_that_has_nothing(nodes: DirectoryNodes) -> None:
    keys = published(nodes, "n07")
    reader = Reader(nodes)
    unknowing, knowing = reader.owners_of(keys[:1])
    nodes.nodes[unknowing].shard = _native.Shard(1 << 10)
    nodes.nodes[unknowing].shard.set_view(
        [node_key(name) for name in (*NAMES, "reader")], [BOOT] * (N_NODES + 1)
    )
    nodes.nodes[knowing].is_stopped = True
    found, _ = reader.look_up(keys, leading=True)
    owners = [reader.owners_of(key[None]) for key in keys]
    assert found[[not {unknowing, knowing}.issuperset(each) for each in owners]].all()


def test_a_holder_speaks_for_itself_alone(nodes: DirectoryNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = published(nodes, "n07")
    nodes.nodes["n11"].publish_keys(keys[1:])
    liar = _native.Shard(1 << 10)
    liar.serve_held(nodes.nodes["n11"].pool.native)
    reader = Reader(nodes)

    def exchange(shard: _native.Shard, boot: int, request: Request, message: bytes) -> bytes:
        return (liar if request.kind is Kind.HELD else shard).answer(message, boot)

    monkeypatch.setattr(reader.control, "_exchange", exchange)
    found, where = reader.look_up(keys)
    assert all_by(found, where, "n07"), "its owners name n07 first, which n11 has a guest of"
    assert reader.control.who(Kind.HELD) == {"n07"}


def test_a_node_from_before_is_asked_no_more_than_once(
    nodes: DirectoryNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = published(nodes, "n07")
    reader = Reader(nodes)

    def exchange(shard: _native.Shard, boot: int, request: Request, message: bytes) -> bytes:
        if request.kind is not Kind.HELD:
            return shard.answer(message, boot)
        _, _, kind, request_id, _, count, _ = HEADER.unpack_from(message)
        return HEADER.pack(MAGIC, VERSION, kind | REPLY, request_id, boot, count, ReplyStatus.MALFORMED)

    monkeypatch.setattr(reader.control, "_exchange", exchange)
    found, where = reader.look_up(keys)
    assert all_by(found, where, "n07")
    assert [name for name, kind in reader.control.asked if kind is Kind.HELD] == ["n07"]


def test_leading_pages_that_a_newcomer_was_not_told_of_are_found_where_they_lay() -> None:
    nodes = DirectoryNodes(*NAMES, "reader")
    keys = published(nodes, "n07")
    newcomers = [f"new{i}" for i in range(20)]
    for name in newcomers:
        node = nodes.add(name)
        node.member = replace(node.member, boot_epoch=node.clock.wall_ns())
    reader = Reader(nodes)
    first = next(row for row, key in enumerate(keys) if set(reader.owners_of(key[None])) <= set(newcomers))
    found, _ = reader.look_up(keys[first:], leading=True)
    assert found.all()
    assert {kind for name, kind in reader.control.asked if name in newcomers} == {Kind.LOCATE}
    nodes.close()


def test_in_a_small_cluster_all_owners_are_asked_at_once() -> None:
    nodes = DirectoryNodes(*NAMES[:7], "reader")
    keys = published(nodes, "n03")
    reader = Reader(nodes)
    found, _ = reader.look_up(keys)
    assert found.all()
    assert not reader.control.who(Kind.HELD)
    nodes.close()
