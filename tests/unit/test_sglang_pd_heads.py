"""SGLang's prefill and decode servers of unequal tensor parallelism: every head of every token, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from cluster import eventually
from p2pkv.integrations.sglang.pd.heads import HeadRows, Split, difference
from p2pkv.integrations.sglang.pd.rows import Shape
from p2pkv.testing.ports import free_port
from sglang_ranks import SETTLE_S, DecodeRank, PrefillRank, hand_over, heads_of, model_kv, start_nodes

SIZES = (1, 2, 4, 8)
N_PAGES = 5


class Servers:
    """A prefill and a decode server of each size, for a model of ``n_heads`` KV heads."""

    def __init__(self, n_heads: int) -> None:
        self.n_heads = n_heads
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._nodes = start_nodes(2 * max(SIZES), f"127.0.0.1:{free_port()}")
        half = max(SIZES)
        self.prefill = {
            size: [PrefillRank(self._nodes[i], self._context, i, size, n_heads) for i in range(size)]
            for size in SIZES
        }
        self.decode = {
            size: [DecodeRank(self._nodes[half + i], self._context, i, size, n_heads) for i in range(size)]
            for size in SIZES
        }
        self.rooms = count(1)
        eventually(lambda: all(len(node.members()) == len(self._nodes) for node in self._nodes), SETTLE_S)

    def close(self) -> None:
        ranks = [rank for servers in (self.prefill, self.decode) for r in servers.values() for rank in r]
        with ThreadPoolExecutor(len(ranks)) as pool:
            list(pool.map(lambda rank: rank.close(), ranks))
            list(pool.map(lambda node: node.close(), self._nodes))
        self._context.term()


@pytest.fixture(scope="module", params=[8, 2])
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    servers = Servers(request.param)
    yield servers
    servers.close()


@pytest.mark.parametrize("to_size", SIZES)
@pytest.mark.parametrize("from_size", SIZES)
def test_each_decode_rank_gets_its_heads(servers: Servers, from_size: int, to_size: int) -> None:
    prefill, decode = servers.prefill[from_size], servers.decode[to_size]
    room = next(servers.rooms)
    kv = model_kv(servers.n_heads, N_PAGES, seed=room)
    hand_over(prefill, decode, room, kv, seed=room)
    for source in prefill:
        source.side.close(room, None)


@pytest.mark.parametrize("n_heads", [1, 2, 8, 32])
def test_heads_are_asked_of_ranks_that_sglang_tells_of_the_request(n_heads: int) -> None:
    for from_size in (1, 2, 4, 8, 16):
        for to_size in (1, 2, 4, 8, 16):
            for rank in range(to_size):
                rows = HeadRows(
                    SimpleNamespace(),  # type: ignore[arg-type]
                    Split(from_size, 0, n_heads),
                    Split(to_size, rank, n_heads),
                )
                first, end = rank * from_size // to_size, max(1, from_size // to_size)
                asked = range(first, first + end)
                assert set(rows.sources) <= set(asked)
                wanted = set(range(*heads_of(rank, to_size, n_heads)))
                given = [
                    set(range(*heads_of(source, from_size, n_heads))) & wanted for source in rows.sources
                ]
                assert set().union(*given) == wanted
                assert sum(map(len, given)) == len(wanted)


PAGE = Split(2, 0, 8, 16)


@pytest.mark.parametrize(
    ("other", "pages", "said"),
    [
        (Split(4, 0, 8, 16), (1024, 512), None),
        (Split(4, 0, 8, 16), (1024, 1024), "buffers of"),
        (Split(4, 0, 4, 16), (1024, 512), "8 heads and pages of 16 tokens here, 4 heads"),
        (Split(4, 0, 8, 32), (1024, 512), "pages of 32 tokens"),
        (Split(3, 0, 8, 16), (1024, 512), "can't be shared among 3"),
        (Split(16, 3, 8, 16), (512, 256), None),
        (Split(4, 0, 8, 16), (1023, 512), "no 4 heads"),
        (Split(4, 0, 8, 16), (1024,), "2 buffers"),
    ],
)
def test_servers_whose_heads_cannot_be_paired_say_why(
    other: Split, pages: tuple[int, ...], said: str | None
) -> None:
    mine = Shape((2048, 1024), (), (64,), "a model")
    reason = difference(mine, PAGE, Shape(pages, (), (64,), "a model"), other)
    assert (reason is None) == (said is None), reason
    assert said is None or said in str(reason)


def test_states_and_one_buffer_for_all_layers_are_not_shared_out() -> None:
    other = Split(4, 0, 8, 16)
    states = Shape((2048, 1024), (("mamba", (8,)),), (64,), "a model")
    assert "states can't be shared out anew" in str(difference(states, PAGE, states, other))
    one = Shape((2048,), (), (64,), "a model")
    assert "one buffer" in str(difference(one, PAGE, one, other))


@pytest.mark.parametrize(
    ("changed", "n_heads"),
    [
        ({"total_kv_head_num": 8}, 8),
        ({}, 6),
        ({"total_kv_head_num": 8, "num_draft_entries": 2}, 0),
    ],
)
def test_what_sglang_says_of_its_heads(changed: dict[str, int], n_heads: int) -> None:
    args: Any = SimpleNamespace(page_size=16, **changed)
    assert Split.of(args, 4, 1, is_mla=False, n_heads=6) == Split(4, 1, n_heads, 16)
    assert Split.of(args, 4, 1, is_mla=True, n_heads=6) == Split(4, 1, 0, 16)


def test_an_impossible_split_is_refused() -> None:
    for wrong in ((0, 0, 1, 1), (2, 2, 1, 1), (1, -1, 1, 1), (1, 0, -1, 1), (1, 0, 1, 0)):
        with pytest.raises(ValueError, match="impossible"):
            Split(*wrong)
