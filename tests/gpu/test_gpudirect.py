"""Rows from device to device over network cards: every byte right, and what cards can't have goes through staging.

The cards and the driver are emulated, in this process: no card that could reach a GPU was ever here.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from device_buffers import EmulatedBuffer, VirtualBuffer
from device_ends import NBYTES, Ends, N
from fake_ibverbs import ADDRESS, DMABUF, FakeIbverbs
from p2pkv.transfers import RowStatus

_REFUSED = 'refused_device_memories_total{transport="verbs"}'
_DIRECT = (N * NBYTES, 0, 0)
_STAGED = (0, N * NBYTES, N * NBYTES)


@pytest.fixture
def open_ends(cards: FakeIbverbs) -> Iterator[Callable[..., Ends]]:
    opened: list[Ends] = []

    def open_ends(kind: type[EmulatedBuffer] = EmulatedBuffer, **options: Any) -> Ends:
        verbs = {"library": cards.path, "gpudirect": True} | options
        opened.append(Ends(kind, transports=["verbs", "tcp"], transport_options={"verbs": verbs}))
        return opened[-1]

    yield open_ends
    for ends in opened:
        ends.close()


@pytest.mark.parametrize("made_as", [EmulatedBuffer, VirtualBuffer])
def test_rows_go_from_device_to_device_over_the_cards_and_nothing_is_staged(
    open_ends: Callable[..., Ends], cards: FakeIbverbs, made_as: type[EmulatedBuffer]
) -> None:
    before = cards.counts()
    ends = open_ends(made_as)
    ends.meet()
    ends.hand_over("put", 2)
    expected = ends.fill(3)
    offer = ends.producer.transfers.offer("left", ends.rows(0))
    got = ends.consumer.transfers.get(ends.producer.node_id, "left", ends.rows(1))
    assert not got.any(), got
    assert not offer.wait(5.0).any()
    assert np.array_equal(ends.buffers[1].read().reshape(N, NBYTES), expected)
    assert ends.went() == (2 * N * NBYTES, 0, 0)
    assert cards.counts().held_back > before.held_back, "no card kept bytes that it had to be made to push"
    assert ends.count(ends.consumer, _REFUSED) == ends.count(ends.producer, _REFUSED) == 0


def test_a_kernel_is_waited_for_on_both_sides(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends()
    ends.meet()
    ends.hand_over_behind_kernels()
    assert ends.went() == (2 * N * NBYTES, 0, 0)


def _refuse(cards: FakeIbverbs, first: int) -> None:
    cards.refuse(DMABUF, first)


def _deceive(cards: FakeIbverbs, first: int) -> None:
    cards.deceive(DMABUF, first)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_refuse, "as a dmabuf: ibv_reg_dmabuf_mr on emulated0:1: Operation not supported"),
        (_deceive, "as a dmabuf: emulated0:1 reads other bytes than are in the memory"),
    ],
    ids=["refused", "other bytes"],
)
def test_memory_that_cards_can_not_have_is_staged_and_it_is_said_why(
    cards: FakeIbverbs,
    open_ends: Callable[..., Ends],
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[FakeIbverbs, int], None],
    says: str,
) -> None:
    spoil(cards, -1)
    with caplog.at_level(logging.WARNING, "p2pkv"):
        ends = open_ends()
    ends.meet()
    ends.hand_over("put", 4)
    assert ends.went() == _STAGED
    # the producer's memory is to be read by peers, and read into: it is said once
    told = [record.message for record in caplog.records if "are staged over verbs: " in record.message]
    assert len(told) == 2, told
    for message in told:
        assert says in message
        assert "as a dmabuf over PCIe: " in message
        assert "by its address: ibv_reg_mr on emulated0:1: Bad address (is nvidia-peermem loaded?)" in message
    assert ends.count(ends.consumer, _REFUSED) == ends.count(ends.producer, _REFUSED) == 1


@pytest.mark.parametrize("has_it", [0, 1], ids=["the producer's", "the receiver's"])
def test_one_memory_that_cards_can_not_have_is_enough_to_stage(
    cards: FakeIbverbs, open_ends: Callable[..., Ends], has_it: int
) -> None:
    ends = open_ends()
    ends.meet()
    for way in (DMABUF, ADDRESS):
        cards.refuse(way)
    owner = (ends.consumer, ends.producer)[has_it]
    (ends.target, ends.source)[has_it].close()
    again = owner.register_memory(ends.buffers[1 - has_it].array, readable=has_it == 1)
    assert ends.count(owner, _REFUSED) == 1
    ends.hand_over("put", 5)
    assert ends.went() == _STAGED
    again.close()
    cards.reset()
    owner.register_memory(ends.buffers[1 - has_it].array, readable=has_it == 1)
    ends.hand_over("again", 6)
    assert ends.went()[0] == N * NBYTES


def test_by_itself_no_card_gets_to_know_device_memory(
    open_ends: Callable[..., Ends], cards: FakeIbverbs, caplog: pytest.LogCaptureFixture
) -> None:
    before = cards.counts()
    ends = open_ends(gpudirect=False)
    ends.meet()
    ends.hand_over("put", 7)
    assert ends.went() == _STAGED
    after = cards.counts()
    assert (after.dmabufs, after.addresses) == (before.dmabufs, before.addresses)
    assert not [record for record in caplog.records if "staged" in record.message]


def test_a_withdrawn_offer_is_never_ok_whatever_was_read(open_ends: Callable[..., Ends]) -> None:
    """The receiver waits for its stream, and reads what is somebody else's by then."""
    ends = open_ends()
    ends.meet()
    stream = ends.buffers[1].fill_later(0)
    with ends.consumer.transfers.grant("withdrawn", ends.rows(1), timeout=20.0, stream=stream) as grant:
        offer = ends.producer.transfers.put_async(ends.consumer.node_id, "withdrawn", ends.rows(0))
        statuses = offer.withdraw()
        ends.buffers[0].write(np.full((N, NBYTES), 0xEE, np.uint8))
        got = grant.wait(10.0)
    for told, status in zip(statuses, got, strict=True):
        assert told == RowStatus.OK or status != RowStatus.OK


@pytest.mark.parametrize("seed", range(2))
def test_whatever_rows_are_asked_for_and_refused_no_other_byte_is_written(
    cards: FakeIbverbs, open_ends: Callable[..., Ends], seed: int
) -> None:
    """Requests of rows of any length and place, into memory that cards are refused now and then."""
    rng = random.Random(seed)
    ends = open_ends(rng.choice([EmulatedBuffer, VirtualBuffer]))
    ends.meet()
    size, longest = N * NBYTES, 200_000  # the staging has room for no more of one row
    expected = ends.buffers[1].read()
    went = set()
    for i in range(8):
        if i % 3 != 0:  # the next way is had, then none, which stays so for the request after it
            ends.target.close()
            spoil = rng.choice([cards.refuse, cards.deceive])
            spoil(DMABUF, 1 if i % 3 == 1 else -1)
            ends.target = ends.consumer.register_memory(ends.buffers[1].array)
            cards.reset()
        given = ends.fill(1000 * seed + i).reshape(-1)
        cuts = sorted(rng.sample(range(size), 2 * rng.randint(1, 40)))
        lengths = [min(end - begin, longest) for begin, end in zip(cuts[::2], cuts[1::2], strict=True)]
        starts = [[rng.randrange(size - n) for n in lengths], cuts[::2]]
        spans = [
            np.array(
                [(ends.buffers[side].address + at, n) for at, n in zip(starts[side], lengths, strict=True)],
                np.int64,
            )
            for side in (0, 1)
        ]
        before = ends.went()[0]
        with ends.consumer.transfers.grant(f"request {i}", spans[1]) as grant:
            assert not ends.producer.transfers.put(ends.consumer.node_id, f"request {i}", spans[0]).any()
            assert not grant.wait(5.0).any()
        for source, target, n in zip(*starts, lengths, strict=True):
            expected[target : target + n] = given[source : source + n]
        assert np.array_equal(ends.buffers[1].read(), expected), f"request {i}"
        went.add(ends.went()[0] > before)
    assert went == {True, False}, "only one of both ways was tried out"


def test_closed_memory_is_known_to_no_card(open_ends: Callable[..., Ends], cards: FakeIbverbs) -> None:
    ends = open_ends()
    ends.meet()
    before = cards.counts().regions
    ends.source.close()
    ends.target.close()
    # two cards, and a memory on either side
    eventually(lambda: cards.counts().regions == before - 4, 10.0)
