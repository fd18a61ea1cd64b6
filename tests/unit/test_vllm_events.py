"""What vLLM's own KV events tell of blocks in p2pkv's memory and on its disks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from p2pkv import UsageError
from p2pkv.integrations.vllm_connector import block_contents
from p2pkv.integrations.vllm_connector.block_events import BlockEvents
from p2pkv.integrations.vllm_connector.groups import Group, Kind
from p2pkv.integrations.vllm_connector.prefixes import Part
from p2pkv.integrations.vllm_connector.residents import BlockName, Change, Residents
from p2pkv.page import page_key
from vllm_engine import EngineFake
from vllm_fakes import BLOCK, RequestFake
from vllm_instances import Open

N_TOKENS = 6 * BLOCK


class Follower:
    """Knows what a subscriber to an engine's events would know."""

    def __init__(self, engine: EngineFake) -> None:
        self.engine = engine
        self.there: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}

    def until(self, is_so: Callable[[], bool]) -> None:
        def look() -> bool:
            for event in self.engine.scheduler.take_events():
                hashes = set(event.block_hashes)
                assert event.group_idx == 0
                if hasattr(event, "token_ids"):
                    assert not hashes & self.there[event.medium], "told twice"
                    self.there[event.medium] |= hashes
                else:
                    assert hashes <= self.there[event.medium], "gone before it was there"
                    self.there[event.medium] -= hashes
            return is_so()

        self.engine.step_until(look, 20.0)


def test_blocks_are_told_when_they_are_there_and_when_they_have_gone(
    open_engine: Open, tmp_path: Path
) -> None:
    settings = {"disk_path": str(tmp_path / "disk"), "disk_size": "8MiB"}
    engine = open_engine(settings, tells_events=True)
    follower = Follower(engine)
    request = engine.run(engine.submit(list(range(N_TOKENS))))
    hashes = set(request.block_hashes)
    follower.until(lambda: follower.there == {"CPU": hashes, "STORAGE": hashes})
    engine.scheduler.reset_cache()
    follower.until(lambda: not any(follower.there.values()))
    again = engine.run(engine.submit(list(range(N_TOKENS))))
    follower.until(lambda: follower.there["CPU"] == set(again.block_hashes))


@pytest.mark.parametrize("attached", [False, True])
def test_what_the_pool_gives_up_is_told(open_engine: Open, *, attached: bool) -> None:
    engine = open_engine(tells_events=True)
    follower = Follower(engine)
    told: set[bytes] = set()
    for prompt in range(60):  # 360 blocks, of which a pool of 1 MiB holds 256
        request = engine.run(engine.submit([prompt * 1000 + i for i in range(N_TOKENS)]))
        told |= set(request.block_hashes)
    engine.step_until(lambda: engine.is_idle)
    part = Part(0, 0, engine.worker.get_handshake_metadata().layouts[0])
    hashes = list(told)

    def is_true() -> bool:
        there = engine.node.exists([part.key(h) for h in hashes])  # to which evictions come a little later
        return follower.there["CPU"] == {h for h, hit in zip(hashes, there, strict=True) if hit}

    follower.until(is_true)
    assert 0 < len(follower.there["CPU"]) < len(told)


def test_events_say_what_is_in_blocks_and_after_which_ones_they_come(open_engine: Open) -> None:
    engine = open_engine(tells_events=True)
    tokens = list(range(N_TOKENS))
    hashes = engine.run(engine.submit(tokens)).block_hashes
    longer = [*tokens, *range(9000, 9000 + 2 * BLOCK)]
    further = engine.run(engine.submit(longer)).block_hashes[len(hashes) :]
    told: dict[bytes, list[int]] = {}
    parents: dict[bytes, bytes | None] = {}

    def look() -> bool:
        for event in engine.scheduler.take_events():
            n = event.block_size
            assert n == BLOCK
            before = event.parent_block_hash
            for at, block_hash in enumerate(event.block_hashes):
                told[block_hash] = event.token_ids[at * n : (at + 1) * n]
                parents[block_hash], before = before, block_hash
        return len(told) == len(hashes) + len(further)

    engine.step_until(look, 20.0)
    chain = [*hashes, *further]
    assert [told[h] for h in chain] == [longer[i : i + BLOCK] for i in range(0, len(longer), BLOCK)]
    assert [parents[h] for h in chain] == [None, *chain[:-1]]


def test_blocks_that_do_not_follow_each_other_are_told_apart() -> None:
    events = BlockEvents()
    events.connect([frozenset({0})])
    group = Group(Kind.FULL, BLOCK)
    one, other = (
        RequestFake(name, [start + i for i in range(3 * BLOCK)], None)
        for name, start in (("1", 0), ("2", 900))
    )
    for request in (one, other):
        events.contents.note(request, 0, group, range(3), BLOCK)
    unknown = b"unknown"
    told = [*one.block_hashes[:2], *other.block_hashes[1:], unknown]
    events.hear([Change(0, "CPU", True, BlockName(0, block_hash)) for block_hash in told])
    first, second, third = events.take()
    assert (first.block_hashes, first.parent_block_hash) == (list(one.block_hashes[:2]), None)
    assert first.token_ids == one.all_token_ids[: 2 * BLOCK]
    assert (second.block_hashes, second.parent_block_hash) == (
        list(other.block_hashes[1:]),
        other.block_hashes[0],
    )
    assert second.token_ids == other.all_token_ids[BLOCK:]
    assert (third.block_hashes, third.token_ids, third.block_size) == ([unknown], [], 0)


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2), (2, 0, 1), (0, 2, 1)])
def test_no_block_is_told_before_the_one_that_it_follows(order: tuple[int, ...]) -> None:
    events = BlockEvents()
    events.connect([frozenset({0})])
    group = Group(Kind.FULL, BLOCK)
    request = RequestFake("1", list(range(4 * BLOCK)), None)
    events.contents.note(request, 0, group, range(4), BLOCK)
    chain = list(request.block_hashes[1:])
    # a pool lists its pages in any order
    events.hear([Change(0, "CPU", True, BlockName(0, chain[at])) for at in order])
    (event,) = events.take()
    assert event.block_hashes == chain
    assert event.parent_block_hash == request.block_hashes[0]
    assert event.token_ids == request.all_token_ids[BLOCK:]


def test_blocks_of_which_nobody_knows_what_is_in_them_are_told_without_tokens() -> None:
    events = BlockEvents()
    events.connect([frozenset({0})])
    events.hear([Change(0, "CPU", True, BlockName(0, name)) for name in (b"a", b"b")])
    (event,) = events.take()
    assert (event.block_hashes, event.token_ids, event.block_size) == ([b"a", b"b"], [], 0)
    assert event.parent_block_hash is None


def test_what_is_in_blocks_that_are_nowhere_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_contents, "_SPARE", 3)
    events = BlockEvents()
    events.connect([frozenset({0})])
    group = Group(Kind.FULL, BLOCK)
    requests = [RequestFake(str(i), [i] * BLOCK, None) for i in range(10)]
    for request in requests:
        events.contents.note(request, 0, group, range(1), BLOCK)
        name = BlockName(0, request.block_hashes[0])
        events.hear([Change(0, "CPU", True, name)])
        assert events.take()[0].token_ids == request.all_token_ids
        if request is not requests[0]:
            events.hear([Change(0, "CPU", False, name)])
            events.take()
    assert len(events.contents) <= 1 + 3
    events.hear([Change(0, "STORAGE", True, BlockName(0, requests[0].block_hashes[0]))])
    assert events.take()[0].token_ids == requests[0].all_token_ids


def test_nothing_is_followed_unless_vllm_tells_events(open_engine: Open) -> None:
    engine = open_engine()
    assert engine.node.config.kv_events == ""
    engine.run(engine.submit(list(range(N_TOKENS))))
    engine.step_until(lambda: engine.is_idle)
    assert engine.scheduler.take_events() == []
    with pytest.raises(UsageError, match="set kv_events"):
        engine.node.follow_kv_events(lambda kind, medium, keys: None)


def test_a_block_is_there_once_all_ranks_have_it_and_goes_with_the_first() -> None:
    events = BlockEvents()
    events.connect([frozenset({0, 1}), frozenset({1})])
    block, other = BlockName(0, b"b"), BlockName(1, b"o")

    def told(*changes: Change) -> list[tuple[bool, str, list[bytes]]]:
        events.hear(changes)
        return [(hasattr(e, "token_ids"), e.medium, e.block_hashes) for e in events.take()]

    assert told(Change(0, "CPU", True, block)) == []
    assert told(Change(1, "STORAGE", True, block), Change(1, "CPU", True, other)) == [(True, "CPU", [b"o"])]
    assert told(Change(1, "CPU", True, block)) == [(True, "CPU", [b"b"])]
    assert told(Change(0, "CPU", False, block)) == [(False, "CPU", [b"b"])]
    assert told(Change(1, "CPU", False, block), Change(1, "STORAGE", False, block)) == []
    assert told(
        Change(0, "CPU", True, block), Change(1, "CPU", True, block), Change(0, "CPU", False, block)
    ) == [(True, "CPU", [b"b"]), (False, "CPU", [b"b"])]


def test_what_goes_and_comes_back_between_two_steps_is_not_told() -> None:
    residents = Residents(3, "space")
    key = page_key("space", b"name", 2)
    residents.hear("BlockStored", "CPU", [key])
    assert residents.take() == [], "nobody has said what that is"
    residents.name([b"name"], 2, [BlockName(0, b"hash")])
    residents.hear("AllBlocksCleared", "", ())
    residents.hear("BlockStored", "CPU", [key])
    stored = Change(3, "CPU", True, BlockName(0, b"hash"))
    assert residents.take() == [stored]
    residents.hear("AllBlocksCleared", "", ())
    residents.hear("BlockStored", "CPU", [key])
    assert residents.take() == []
    residents.hear("BlockRemoved", "CPU", [key])
    gone = Change(3, "CPU", False, BlockName(0, b"hash"))
    assert residents.take() == [gone]
    residents.hear("BlockStored", "CPU", [key])
    assert residents.take() == [stored]
    residents.hear("AllBlocksCleared", "", ())
    assert residents.take() == [gone]
