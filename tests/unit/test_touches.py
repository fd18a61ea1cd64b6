"""Owners keep what others read: readers tell them, unless they are set not to, and what is no use is not told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from cluster import eventually
from p2pkv import Config, Node, PrefetchOutcome
from p2pkv.cache.page_cache import PageCache
from p2pkv.cache.touching import Touching
from p2pkv.metrics import Metrics
from p2pkv.parts.cache import CacheParts

NBYTES = 64 * 1024
N_ROOM = 32
SETTLE_S = 10.0
USE = np.dtype([("key", "u1", 16), ("stamp", "<u8"), ("nbytes", "<u8")])
"""As ``Pool.list_uses`` gives it."""
TOLD, HEARD = "p2pkv_told_touches_total", "p2pkv_heard_touches_total"


@contextmanager
def owner_and_reader(*, touch: bool = True) -> Iterator[tuple[Node, Node, np.ndarray]]:
    memory = np.ones((N_ROOM, NBYTES), np.uint8)
    with (
        Node.start(Config(node_id="owner", pool_size=N_ROOM * NBYTES)) as owner,
        Node.start(
            Config(node_id="reader", join=[owner.address], pool_size=8 * NBYTES, touch=touch)
        ) as reader,
    ):
        for node in (owner, reader):
            node.register_memory(memory)
            eventually(lambda node=node: len(node.members()) == 2, SETTLE_S)
        yield owner, reader, memory


def read_until_heard(owner: Node, reader: Node, keys: list[str], memory: np.ndarray) -> None:
    """Read again and again: at first there is no channel that it could be told over."""
    heard = owner.counters()[HEARD]

    def is_heard() -> bool:
        assert reader.fetch(keys, memory[: len(keys)]).all()
        return owner.counters()[HEARD] >= heard + len(keys)

    eventually(is_heard, SETTLE_S)


def oldest_first(node: Node, keys: list[str]) -> list[str]:
    cache = node._cache
    assert isinstance(cache, PageCache)
    by_id = {bytes(raw): key for raw, key in zip(cache.hash(keys)[1], keys, strict=True)}
    caching = node._parts.caching
    assert isinstance(caching, CacheParts)
    raw, _ = caching.pool.native.list_uses(0, 100)
    uses = np.sort(raw.reshape(-1).view(USE), order="stamp")
    return [by_id[bytes(use["key"])] for use in uses if bytes(use["key"]) in by_id]


def test_a_page_that_is_read_elsewhere_outlives_those_that_nobody_reads() -> None:
    with owner_and_reader() as (owner, reader, memory):
        read, unread = [f"read {i}" for i in range(4)], [f"unread {i}" for i in range(4)]
        assert owner.publish([*read, *unread], memory[:8]).all()
        for i in range(4):
            read_until_heard(owner, reader, read, memory)
            assert owner.publish([f"more {i} {k}" for k in range(12)], memory[:12]).all()
        assert reader.fetch(read, memory[:4]).all()
        assert not owner.exists(unread).any()
        assert reader.counters()[TOLD] >= owner.counters()[HEARD]


def test_who_is_set_not_to_touch_tells_nobody() -> None:
    with owner_and_reader(touch=False) as (owner, reader, memory):
        keys = [f"page {i}" for i in range(4)]
        assert owner.publish(keys, memory[:4]).all()
        for _ in range(20):
            assert reader.fetch(keys, memory[:4]).all()
        assert reader.counters()[TOLD] == 0
        assert owner.counters()[HEARD] == 0


def test_a_prefetch_is_no_use_of_a_page() -> None:
    with owner_and_reader() as (owner, reader, memory):
        first, last = ["a", "b"], ["read", "unread"]
        assert owner.publish(first, memory[:2]).all()
        assert owner.publish(last, memory[:2]).all()
        read_until_heard(owner, reader, last[:1], memory)
        prefetch = reader.prefetch(first)
        assert prefetch.wait(SETTLE_S)
        assert (prefetch.outcomes == PrefetchOutcome.BROUGHT).all()
        for _ in range(2):  # the second round has begun after the prefetch
            read_until_heard(owner, reader, last[:1], memory)
        assert oldest_first(owner, [*first, *last]) == ["b", "a", "unread", "read"]


class _Noted:
    """Stands for what native code has noted."""

    def __init__(self, *rounds: list[tuple[int, int, np.ndarray]]) -> None:
        self.rounds = list(rounds)

    def drain(self, timeout: float) -> list[tuple[int, int, np.ndarray]]:
        return self.rounds.pop(0)

    def close(self) -> None:
        """Wake nobody."""


class _Directory:
    """Tells owners of so many pages, call by call, and notes of which."""

    def __init__(self, *most: int) -> None:
        self.most = list(most)
        self.told: list[int] = []

    def touch(self, owner: int, boot: int, keys: np.ndarray) -> int:
        n = min(self.most.pop(0), len(keys))
        self.told += keys[:n, 0].tolist()
        return n


def test_what_can_not_be_told_now_is_told_with_the_next_round_or_never() -> None:
    keys = np.arange(4, dtype=np.uint8).repeat(16).reshape(4, 16)
    noted = _Noted([(7, 1, keys[:3])], [(7, 1, keys[3:])], [])
    directory = _Directory(1, 1, 0, 1)
    metrics = Metrics()
    touching = Touching(noted, directory, metrics)  # type: ignore[arg-type]
    touching.turn(0.0)
    assert directory.told == [0]
    touching.turn(0.0)
    assert directory.told == [0, 1], "one of those that were left, which had their second chance"
    touching.turn(0.0)
    assert directory.told == [0, 1, 3]
    assert metrics.told_touches.value == 3
    touching.close()
