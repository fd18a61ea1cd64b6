"""HiCache servers of unequal tensor parallelism share pages that are split by heads: every pair, byte for byte."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache_backends import PAGES, FailingNode, Open, failed, storage_config
from host_pools import HostPoolFake
from p2pkv import UsageError
from p2pkv.integrations.sglang_hicache import P2PKVHiCache

HEADS = 8
SIZES = [1, 2, 4]
LCM = 4


class Server:
    """The ranks of one server, each with its part of the heads in a pool of its own."""

    def __init__(self, open_backend: Open, tp_size: int, lcm: int | None = LCM) -> None:
        self.pools = [HostPoolFake("page_head", heads=HEADS // tp_size) for _ in range(tp_size)]
        is_split = lcm is not None and lcm > tp_size
        config: dict[str, Any] = {"tp_size": tp_size, "tp_lcm_size": lcm, "should_split_heads": is_split}
        self.ranks = [
            open_backend(pool, None, tp_rank=rank, **config) for rank, pool in enumerate(self.pools)
        ]

    def fill(self, page: int, seed: int) -> None:
        """Have each rank compute its heads of a page whose bytes ``seed`` tells."""
        whole = np.random.default_rng(seed).integers(0, 100, (2, HEADS, *self.pools[0].arrays[0].shape[3:]))
        for pool, part in zip(self.pools, np.split(whole, len(self.pools), axis=1), strict=True):
            pool.arrays[0][:, page] = part

    def content(self, page: int) -> bytes:
        """Return all heads of a page."""
        return np.concatenate([pool.arrays[0][:, page] for pool in self.pools], axis=1).tobytes()

    def set(self, keys: list[str], pages: list[int]) -> None:
        """Have all ranks publish."""
        for rank, pool in zip(self.ranks, self.pools, strict=True):
            assert rank.batch_set_v1(keys, pool.indices(*pages)) == [True] * len(keys)

    def get(self, keys: list[str], pages: list[int]) -> list[bool]:
        """Have all ranks fetch; a page is there if every rank has it."""
        got = [
            rank.batch_get_v1(keys, pool.indices(*pages))
            for rank, pool in zip(self.ranks, self.pools, strict=True)
        ]
        return [all(of_page) for of_page in zip(*got, strict=True)]


@pytest.mark.parametrize("reader_size", SIZES)
@pytest.mark.parametrize("writer_size", SIZES)
def test_every_pair_of_sizes_shares_every_byte(
    open_backend: Open, writer_size: int, reader_size: int
) -> None:
    writer, reader = Server(open_backend, writer_size), Server(open_backend, reader_size)
    pages = Random(writer_size * 8 + reader_size).sample(range(16), len(PAGES))
    for seed, page in enumerate(pages):
        writer.fill(page, seed)
    writer.set(PAGES, pages)
    assert [rank.batch_exists(PAGES) for rank in reader.ranks] == [len(PAGES)] * reader_size
    assert reader.get(PAGES, pages[::-1]) == [True] * len(PAGES)
    assert [reader.content(page) for page in pages[::-1]] == [writer.content(page) for page in pages]


def test_the_largest_server_needs_no_word_of_it(open_backend: Open) -> None:
    large, small = Server(open_backend, LCM, lcm=None), Server(open_backend, 1)
    large.fill(3, 1)
    large.set(PAGES[:1], [3])
    assert small.get(PAGES[:1], [5]) == [True]
    assert small.content(5) == large.content(3)


def test_a_page_one_of_whose_shares_is_missing_is_not_there(open_backend: Open) -> None:
    writer, reader = Server(open_backend, 2), Server(open_backend, 1)
    for page in range(3):
        writer.fill(page, page)
    writer.set(PAGES[:1], [0])
    for rank, keys in ((0, [PAGES[1]]), (1, [PAGES[2]])):  # one rank each has these two
        page = PAGES.index(keys[0])
        assert writer.ranks[rank].batch_set_v1(keys, writer.pools[rank].indices(page)) == [True]
    assert reader.get(PAGES[:3], [0, 1, 2]) == [True, False, False]
    assert reader.ranks[0].batch_exists(PAGES[:3]) == 1
    assert reader.ranks[0].batch_exists(PAGES[1:3]) == 0
    assert reader.ranks[0].batch_exists_v2(PAGES[:3], []).kv_hit_pages == 1
    assert reader.content(0) == writer.content(0)


def test_side_pools_go_beside_pages_that_are_split(open_backend: Open) -> None:
    writer, reader = Server(open_backend, 1), Server(open_backend, 1)
    sides = [HostPoolFake(kind="mla") for _ in range(2)]
    for server, side in zip((writer, reader), sides, strict=True):
        server.ranks[0].register_mem_host_pool_v2(side, "indexer")
    writer.set(PAGES[:3], [0, 1, 2])
    wanted = SimpleNamespace(
        name="indexer", keys=PAGES[:2], host_indices=sides[0].indices(0, 1), hit_policy="all_pages"
    )
    assert writer.ranks[0].batch_set_v2([wanted]) == {"indexer": [True] * 2}
    assert reader.ranks[0].batch_exists_v2(PAGES, []).kv_hit_pages == 3
    hits = reader.ranks[0].batch_exists_v2(PAGES, [wanted])
    assert (hits.kv_hit_pages, hits.extra_pool_hit_pages) == (2, {"kv": 3, "indexer": 2})


def test_servers_that_split_otherwise_share_nothing(open_backend: Open) -> None:
    one, other = Server(open_backend, 1, lcm=2), Server(open_backend, 1, lcm=4)
    one.fill(0, 1)
    one.set(PAGES[:1], [0])
    assert other.get(PAGES[:1], [0]) == [False]
    assert Server(open_backend, 1, lcm=None).get(PAGES[:1], [0]) == [False]


def test_what_can_not_be_split_is_said(open_backend: Open) -> None:
    split = storage_config(tp_lcm_size=3, should_split_heads=True)
    with pytest.raises(
        UsageError, match=r"can't say where its pages lie in 3 shares of its heads: heads don't"
    ):
        P2PKVHiCache(split, start_node=FailingNode).register_mem_pool_host(HostPoolFake("page_head", heads=8))
    server = Server(open_backend, 1)
    assert not server.ranks[0].set(PAGES[0], server.pools[0].flat_page(0))
    assert failed(server.ranks[0], "set", "UsageError") == 1
