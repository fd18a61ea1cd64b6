"""What vLLM's own KV events tell of blocks in p2pkv's memory and on its disks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from p2pkv import UsageError
from p2pkv.integrations.vllm_connector.block_events import BlockEvents
from p2pkv.integrations.vllm_connector.prefixes import Part
from p2pkv.integrations.vllm_connector.residents import BlockName, Change, Residents
from p2pkv.page import page_key
from vllm_engine import EngineFake
from vllm_fakes import BLOCK
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


def test_what_the_pool_gives_up_is_told(open_engine: Open) -> None:
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
