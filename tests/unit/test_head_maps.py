"""Unequal parallelism: with real bytes, every head of every token lands where the decode rank expects it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pkv import Node, UsageError
from p2pkv.transfers import HeadMap, PageLayout, RowStatus
from transfer_pair import start_nodes

N_HEADS, HEAD_NBYTES, TOKENS, PAGES = 8, 32, 4, 5


def whole_pages(layout: PageLayout) -> NDArray[np.uint8]:
    """Return pages of all heads, ``[page][token][head][byte]``, each byte of its own."""
    shape = (PAGES, TOKENS, layout.n_heads, HEAD_NBYTES)
    return np.random.default_rng(3).integers(0, 256, size=shape, dtype=np.uint8)


def pieces(pages: NDArray[np.uint8], heads: tuple[int, int], layout: PageLayout) -> NDArray[np.uint8]:
    """Return one rank's pieces as they lie in its memory: ``(pages, bytes)``."""
    mine = pages[:, :, heads[0] : heads[1]]
    if layout.order == "page_head":
        mine = mine.transpose(0, 2, 1, 3)
    return np.ascontiguousarray(mine).reshape(PAGES, -1)


def addresses(memory: NDArray[np.uint8]) -> NDArray[np.int64]:
    return memory.ctypes.data + np.arange(PAGES, dtype=np.int64) * memory.strides[0]


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Node]]:
    nodes = start_nodes("prefill", "decode")
    yield nodes
    for node in nodes:
        node.close()


@pytest.mark.parametrize("order", ["token_major", "page_head"])
@pytest.mark.parametrize(("from_tp", "to_tp"), [(4, 2), (2, 4), (4, 4), (1, 8), (16, 2), (2, 16)])
def test_ranks_of_unequal_parallelism_get_their_heads(
    pair: list[Node], order: str, from_tp: int, to_tp: int
) -> None:
    prefill, decode = pair
    layout = PageLayout(order, N_HEADS, HEAD_NBYTES, TOKENS)
    heads = HeadMap(layout, from_tp, to_tp)
    pages = whole_pages(layout)
    sources = [pieces(pages, heads.heads(rank, from_tp), layout) for rank in range(from_tp)]
    expected = [pieces(pages, heads.heads(rank, to_tp), layout) for rank in range(to_tp)]
    targets = [np.zeros_like(piece) for piece in expected]
    memories = [prefill.register_memory(memory, readable=True) for memory in sources]
    memories += [decode.register_memory(memory) for memory in targets]
    assert sources[0].shape[1] == heads.piece_nbytes(from_tp)
    grants = [
        decode.transfers.grant(f"to {rank}", heads.destination_spans(rank, addresses(targets[rank])))
        for rank in range(to_tp)
    ]
    for source in range(from_tp):
        for rank in heads.destinations(source):
            assert source in heads.sources(rank)
            put = prefill.transfers.put(
                decode.node_id,
                f"to {rank}",
                heads.source_spans(source, rank, addresses(sources[source])),
                first_row=heads.first_row(source, rank, PAGES),
            )
            assert not put.any()
    for grant, target, piece in zip(grants, targets, expected, strict=True):
        assert (grant.wait(60.0) == RowStatus.OK).all()
        assert np.array_equal(target, piece)
    for memory in memories:
        memory.close()


def test_each_head_comes_once() -> None:
    for from_tp in (1, 2, 4, 8, 16, 32):
        for to_tp in (1, 2, 4, 8, 16, 32):
            heads = HeadMap(PageLayout("page_head", N_HEADS, 2, 4), from_tp, to_tp)
            for rank in range(to_tp):
                n_rows = len(heads.destination_spans(rank, np.array([1], np.int64)))
                spans = heads.destination_spans(rank, np.array([1], np.int64))
                assert spans[:, 1].sum() == heads.piece_nbytes(to_tp)
                assert n_rows == len(heads.sources(rank))


def test_parallelism_that_splits_a_head_is_refused() -> None:
    layout = PageLayout("token_major", N_HEADS, HEAD_NBYTES, TOKENS)
    for from_tp, to_tp in ((3, 2), (2, 12), (0, 1)):
        with pytest.raises(UsageError, match="must divide"):
            HeadMap(layout, from_tp, to_tp)
    with pytest.raises(UsageError, match="layout"):
        PageLayout("heads_first", N_HEADS, HEAD_NBYTES, TOKENS)
    with pytest.raises(UsageError, match="takes nothing"):
        HeadMap(layout, 4, 2).source_spans(0, 1, np.array([1], np.int64))
