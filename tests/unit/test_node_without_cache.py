"""A node whose pool has no size makes and takes offers, and has no part in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster import eventually
from p2pkv import Config, ConfigError, Node, UsageError
from p2pkv.transfers import RowStatus
from pair import Pair
from transfer_pair import TransferPair, spans_of

CALLS: dict[str, Callable[[Node], object]] = {
    "publish": lambda node: node.publish(["k"], np.zeros((1, 4096), np.uint8)),
    "fetch": lambda node: node.fetch(["k"], np.zeros((1, 4096), np.uint8)),
    "exists": lambda node: node.exists(["k"]),
    "retract": lambda node: node.retract(["k"]),
    "clear": lambda node: node.clear(),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[TransferPair]:
    pair = TransferPair(pool_size=0)
    yield pair
    pair.close()


def test_it_puts_and_gets_rows(pair: TransferPair) -> None:
    request = pair.name()
    with pair.consumer.transfers.grant(request, pair.to_rows()) as grant:
        put = pair.producer.transfers.put(pair.consumer.node_id, request, pair.from_rows())
        assert set(put.tolist()) == {RowStatus.OK}
        assert set(grant.wait(5.0).tolist()) == {RowStatus.OK}
    assert np.array_equal(pair.target, pair.source)


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_the_cache_say_what_to_set(pair: TransferPair, name: str) -> None:
    with pytest.raises(UsageError, match="pool_size is 0"):
        CALLS[name](pair.producer)


def test_it_counts_nothing_of_a_cache(pair: TransferPair) -> None:
    assert [name for name in pair.producer.counters() if "_shard_" in name or "_pool_c" in name] == []


def test_it_holds_no_entries_of_those_that_have_a_cache(tmp_path: Path) -> None:
    pair = Pair(tmp_path, replicas=3)
    settings = {
        "secret_file": pair.owner.config.secret_file,
        "join": pair.owner.config.join,
        "pool_size": 0,
    }
    with Pair.start("without", list, settings) as without:
        eventually(lambda: all(len(node.members()) == 3 for node in (*pair.nodes, without)), 10.0)
        for _ in range(8):
            assert pair.fetch_is_right(pair.publish())
        stats = [node._parts.control.shard.stats()["entries"] for node in (*pair.nodes, without)]
        assert stats == [8 * 8, 8 * 8, 0]
    pair.close()


def test_a_disk_needs_a_pool() -> None:
    with pytest.raises(ConfigError, match="pool_size is 0"):
        Config(node_id="n", disk_size="1GiB", pool_size=0)


def test_memory_of_it_can_be_registered_and_offered(pair: TransferPair) -> None:
    rows = np.ones((2, 512), np.uint8)
    with pair.producer.register_memory(rows, readable=True):
        target = np.zeros_like(rows)
        with pair.consumer.register_memory(target):
            pair.producer.transfers.offer("mine", spans_of(rows))
            got = pair.consumer.transfers.get(pair.producer.node_id, "mine", spans_of(target))
            assert set(got.tolist()) == {RowStatus.OK}
            assert np.array_equal(rows, target)
