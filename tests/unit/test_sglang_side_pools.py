"""Models with several host pools: only prefixes that every pool can serve count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache_backends import PAGES, Open, failed
from host_pools import HostPoolFake
from p2pkv.integrations.sglang.side_pools import prefixes_served


def transfer(name: str, policy: str, n_keys: int = 1, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, hit_policy=policy, keys=PAGES[:n_keys], host_indices=None, **more)


def there(bits: str) -> np.ndarray:
    return np.array([bit == "1" for bit in bits])


@pytest.mark.parametrize(
    ("kv", "policy", "n_keys", "side", "served"),
    [
        ("1111", "all_pages", 1, "1111", [1, 2, 3, 4]),
        ("1111", "all_pages", 1, "1101", [1, 2]),
        ("1101", "all_pages", 1, "1111", [1, 2]),
        ("1111", "all_pages", 1, "0111", []),
        ("1111", "trailing_pages", 1, "0101", [2, 4]),
        ("1111", "trailing_pages", 2, "0111", [3, 4]),
        ("1111", "trailing_pages", 2, "1101", [1, 2]),
        ("1110", "trailing_pages", 1, "0001", []),
        ("1111", "trailing_pages", 0, "0010", [3]),
        ("1111", "block_groups", 1, "0000", [1, 2, 3, 4]),
        ("1111", "not invented yet", 1, "1111", []),
        ("0111", "all_pages", 1, "1111", []),
    ],
)
def test_a_prefix_is_served_if_every_pool_has_its_part(
    kv: str, policy: str, n_keys: int, side: str, served: list[int]
) -> None:
    hits = prefixes_served(there(kv), [transfer("side", policy, n_keys)], {"side": there(side)})
    assert hits.restorable_prefix_pages == served
    assert hits.kv_hit_pages == (served[-1] if served else 0)


def test_a_pool_that_is_not_stored_serves_nothing() -> None:
    hits = prefixes_served(there("1111"), [transfer("unknown", "all_pages")], {})
    assert (hits.kv_hit_pages, hits.restorable_prefix_pages) == (0, [])
    assert hits.extra_pool_hit_pages == {"kv": 4}


def test_side_pools_are_stored_under_keys_of_their_own(open_backend: Open) -> None:
    ours, states = HostPoolFake(), HostPoolFake(page_size=1)
    theirs, their_states = HostPoolFake(), HostPoolFake(page_size=1)
    writer, reader = open_backend(ours), open_backend(theirs)
    writer.register_mem_host_pool_v2(states, "mamba")
    reader.register_mem_host_pool_v2(their_states, "mamba")
    for page in range(4):
        ours.fill(page, page)
    states.fill(3, 77)
    last = transfer("mamba", "trailing_pages")
    assert writer.batch_set_v1(PAGES[:4], ours.indices(0, 1, 2, 3)) == [True] * 4
    assert reader.batch_exists_v2(PAGES[:4], [last]).kv_hit_pages == 0, "the state is missing"

    last.keys, last.host_indices = [PAGES[3]], states.indices(3)
    assert writer.batch_set_v2([last]) == {"mamba": [True]}
    hits = reader.batch_exists_v2(PAGES, [last])
    assert (hits.kv_hit_pages, hits.restorable_prefix_pages) == (4, [4])
    assert hits.extra_pool_hit_pages == {"kv": 4, "mamba": 4}

    last.host_indices = their_states.indices(9)
    assert reader.batch_get_v2([last]) == {"mamba": [True]}
    assert their_states.content(9) == states.content(3)
    assert reader.batch_get_v1(PAGES[:4], theirs.indices(0, 1, 2, 3)) == [True] * 4
    assert theirs.content(3) == ours.content(3)


def test_states_are_the_ranks_own_even_where_its_kv_is_not(open_backend: Open) -> None:
    ours, state = HostPoolFake(kind="mla"), HostPoolFake(page_size=1)
    ranks = [{"tp_rank": rank, "tp_size": 2, "is_mla_model": True} for rank in range(2)]
    first, second = [open_backend(ours, **rank) for rank in ranks]
    for backend in (first, second):
        backend.register_mem_host_pool_v2(state, "mamba")
        backend.register_mem_host_pool_v2(HostPoolFake(kind="mla"), "draft")
    first.batch_set_v1(PAGES[:1], ours.indices(0))
    sent = transfer("mamba", "trailing_pages")
    sent.host_indices = state.indices(0)
    shared = transfer("draft", "all_pages")
    shared.host_indices = np.arange(16)
    assert first.batch_set_v2([sent, shared]) == {"mamba": [True], "draft": [True]}
    assert first.batch_exists_v2(PAGES[:1], [sent]).kv_hit_pages == 1
    assert second.batch_exists_v2(PAGES[:1], [shared]).kv_hit_pages == 1
    assert second.batch_exists_v2(PAGES[:1], [sent]).kv_hit_pages == 0


def test_a_side_pool_that_can_not_be_stored_turns_l3_off_and_says_so(
    open_backend: Open, caplog: pytest.LogCaptureFixture
) -> None:
    class NoTable:
        page_size = 16
        kv_buffer = np.zeros(16)

    class NoMemory(HostPoolFake):
        kv_buffer = None

        def __init__(self) -> None:
            self.page_size = 16

    pool = HostPoolFake()
    backend = open_backend(pool)
    backend.register_mem_host_pool_v2(NoTable(), "indexer")
    backend.register_mem_host_pool_v2(NoMemory(), "draft")
    backend.on_host_pools_registered()
    assert "L3 is off" in caplog.text
    assert "indexer (NoTable: " in caplog.text
    assert "draft (NoMemory: host pool 'draft' has no memory)" in caplog.text
    assert failed(backend, "register", "AttributeError") == 1

    assert backend.batch_set_v1(PAGES[:1], pool.indices(0)) == [False]
    assert not backend.set(PAGES[0], pool.flat_page(0))
    assert backend.node.metrics.counters().get("p2pkv_published_pages_total", 0) == 0
    assert backend.batch_exists(PAGES[:1]) == 0
    sent = transfer("indexer", "all_pages")
    sent.host_indices = pool.indices(0)
    assert backend.batch_exists_v2(PAGES[:1], [sent]).kv_hit_pages == 0
    assert backend.batch_set_v2([sent]) == {"indexer": [False]}
    assert backend.batch_get_v2([sent]) == {"indexer": [False]}


def test_a_pool_without_a_kv_buffer_offers_its_tensors(open_backend: Open) -> None:
    class Index(HostPoolFake):
        """As SGLang's sparse attention has it; it takes what tensors are, and offers no ``kv_buffer``."""

        def __init__(self) -> None:
            super().__init__(kind="mla")
            self.index = self.__dict__.pop("kv_buffer")

        def get_hybrid_pool_buffer(self) -> list[Any]:
            return [self.index]

    kv, ours, theirs = HostPoolFake(), Index(), Index()
    ours.fill(0, 3)
    writer, reader = open_backend(kv), open_backend(kv)
    writer.register_mem_host_pool_v2(ours, "indexer")
    reader.register_mem_host_pool_v2(theirs, "indexer")
    sent = transfer("indexer", "all_pages")
    sent.host_indices = ours.indices(0)
    assert writer.batch_set_v2([sent]) == {"indexer": [True]}
    sent.host_indices = theirs.indices(2)
    assert reader.batch_get_v2([sent]) == {"indexer": [True]}
    assert theirs.content(2) == ours.content(0)


def test_where_the_kv_pool_has_no_memory_the_side_pools_decide(open_backend: Open) -> None:
    anchor, side = HostPoolFake(), HostPoolFake()
    anchor.kv_buffer = None
    writer, reader = open_backend(anchor), open_backend(anchor)
    for backend in (writer, reader):
        backend.register_mem_host_pool_v2(anchor, "kv")
        backend.register_mem_host_pool_v2(side, "deepseek_v4_c4")
    sent = transfer("deepseek_v4_c4", "all_pages", n_keys=3)
    sent.host_indices = side.indices(0, 1, 2)
    assert writer.batch_set_v1(PAGES, anchor.indices(*range(8))) == [True] * 8
    assert writer.batch_set_v2([sent]) == {"deepseek_v4_c4": [True] * 3}
    assert reader.batch_exists_v2(PAGES, [sent]).kv_hit_pages == 3
    assert reader.batch_exists(PAGES) == 0, "nothing says that the side pools have them"
    for policy in ("trailing_pages", "block_groups"):
        sent.hit_policy = policy
        assert reader.batch_exists_v2(PAGES, [sent]).kv_hit_pages == 0, "no pool has something of every page"
    assert reader.batch_exists_v2(PAGES, []).kv_hit_pages == 0
    assert reader.batch_get_v1(PAGES, anchor.indices(*range(8))) == [True] * 8
