"""The benchmark's cluster in one process: what is missing is found missing, and what it says of small ones is so."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

from p2pkv.directory.view import Member
from p2pkv_bench import fabric, news
from p2pkv_bench.fabric_nodes import REPLICAS, Fabric, lacking
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rows import Row

N_MEMBERS, N_PAGES = 5, 40


@pytest.fixture
def few() -> Iterator[Fabric]:
    few = Fabric(seed=1)
    for i in range(N_MEMBERS):
        node = few.add(Member(f"n{i}", 1, f"n{i}:1"), N_PAGES)
        node.publish(np.random.default_rng(i).integers(0, 256, (N_PAGES, 16), np.uint8))
    few.tell()
    yield few
    few.close()


def test_what_nobody_has_put_lacks_and_what_all_have_put_does_not(few: Fabric) -> None:
    assert lacking(few) == REPLICAS * N_MEMBERS * N_PAGES
    few.settle()
    assert lacking(few) == 0


def test_what_a_lost_member_held_lacks_until_it_is_put_again(few: Fabric) -> None:
    few.settle()
    few.lose(["n0"])
    few.tell()
    assert 0 < lacking(few) < REPLICAS * N_MEMBERS * N_PAGES
    few.settle()
    assert lacking(few) == 0


def test_one_entry_that_is_gone_lacks(few: Fabric) -> None:
    few.settle()
    node = few.nodes["n0"]
    keys = next(node.pages())[:1]
    node.directory.drop(keys, node.pool.lookup(keys)[1], few.now + 1.0, by_owner=True)
    assert lacking(few) == REPLICAS


def told(rows: Iterator[Row]) -> dict[str, Row]:
    return {re.sub(r"^\d+ members: ", "", row.case): row for row in rows}


def test_a_small_fabric_has_every_entry_where_it_belongs_whatever_comes_and_goes() -> None:
    plan = Plan(members=(70,), published=7000, tell=lambda _: None)
    with Meeting() as meeting:
        rows = told(fabric.rows(meeting, plan))
    assert [row.case for row in rows.values() if row.is_met is False] == []
    changes = [case.partition(":")[0] for case in rows if case.endswith("entries lacking afterwards")]
    assert len(changes) == 7
    for what in ("a join without a seat", "a loss without a seat"):
        assert rows[f"{what}: entries put"].value.median == 0
    for what in ("a join that takes a seat", "the loss of a seat"):
        assert 1 < rows[f"{what}: the same, of all"].value.median < 8
    assert rows["the loss of a seat: found while nobody knows of it"].value.median == 100


def test_a_change_costs_every_member_a_few_messages() -> None:
    plan = Plan(members=(16,), tell=lambda _: None)
    with Meeting() as meeting:
        rows = told(news.rows(meeting, plan))
    for what in ("a join", "a leave", "a loss", "10 losses at once"):
        assert rows[f"{what}: all know of it after"].value.median < 4
        assert 1 < rows[f"{what}: messages of a member"].value.median < 30
