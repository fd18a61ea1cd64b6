"""Offers that nobody takes for long and that are stowed: the memory is the producer's, and the rows are there."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from cluster import eventually
from p2pkv.transfers import RowStatus
from transfer_pair import TransferPair

N, NBYTES = 64, 5000  # not a multiple of what a row's place is padded to


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[TransferPair]:
    pair = TransferPair(N, NBYTES, buddy_pool_size=N * 8192)
    yield pair
    pair.close()


@pytest.fixture
def pair(shared_pair: TransferPair) -> Iterator[TransferPair]:
    """The pair all tests of this module share: each leaves its buddy pool empty."""
    yield shared_pair
    assert used(shared_pair) == shared_pair.producer.counters()["p2pkv_open_offers"] == 0


def used(pair: TransferPair) -> float:
    return pair.producer.counters()["p2pkv_buddy_pool_used_bytes"]


def all_are(statuses: np.ndarray, status: RowStatus) -> bool:
    return len(statuses) == N and set(statuses.tolist()) == {int(status)}


def test_what_is_stowed_is_got_although_its_memory_is_anothers(pair: TransferPair) -> None:
    request, before = pair.name(), pair.source.copy()
    stowed = pair.producer.counters()["p2pkv_stowed_bytes_total"]
    offer = pair.producer.transfers.offer(request, pair.from_rows())
    copies = offer.stow()
    assert copies is not None
    assert used(pair) > 0
    pair.source[:] = 0
    got = pair.consumer.transfers.get(pair.producer.node_id, request, pair.to_rows(), timeout=60.0)
    assert all_are(got, RowStatus.OK)
    assert np.array_equal(pair.target, before)
    assert offer.done()
    assert pair.producer.counters()["p2pkv_stowed_bytes_total"] == stowed + N * NBYTES
    assert used(pair) > 0, "whoever has the copies may offer them anew"
    del copies
    pair.source[:] = before


def test_copies_can_be_offered_anew(pair: TransferPair) -> None:
    request, before = pair.name(), pair.source.copy()
    offer = pair.producer.transfers.offer(request, pair.from_rows())
    copies = offer.stow()
    assert copies is not None
    offer.withdraw()
    pair.source[:] = 0
    pair.producer.transfers.offer(request + " anew", copies.spans)
    got = pair.consumer.transfers.get(pair.producer.node_id, request + " anew", pair.to_rows(), timeout=60.0)
    assert all_are(got, RowStatus.OK)
    assert np.array_equal(pair.target, before)
    pair.source[:] = before


def test_a_stowed_offer_outlives_its_memory_and_ends_like_any_other(pair: TransferPair) -> None:
    own = np.ones((N, NBYTES), np.uint8)
    spans = np.array([[row.ctypes.data, NBYTES] for row in own], np.int64)
    with pair.producer.register_memory(own, readable=True):
        offer = pair.producer.transfers.offer(pair.name(), spans)
        assert offer.stow() is not None
    assert not offer.done()
    assert all_are(offer.withdraw(), RowStatus.REJECTED)


def test_without_room_an_offer_stays_where_it_is(pair: TransferPair) -> None:
    offers = [pair.producer.transfers.offer(pair.name(), pair.from_rows()) for _ in range(2)]
    assert offers[0].stow() is not None
    unstowed = pair.producer.counters()["p2pkv_unstowed_offers_total"]
    assert offers[1].stow() is None
    assert pair.producer.counters()["p2pkv_unstowed_offers_total"] == unstowed + 1
    got = pair.consumer.transfers.get(pair.producer.node_id, offers[1].request, pair.to_rows(), timeout=60.0)
    assert all_are(got, RowStatus.OK)
    assert pair.is_right()
    offers[0].withdraw()
    assert offers[0].stow() is None, "it is over"


def test_what_is_put_and_what_has_nowhere_to_go_is_not_stowed(pair: TransferPair) -> None:
    put = pair.producer.transfers.put_async(pair.consumer.node_id, pair.name(), pair.from_rows())
    assert put.stow() is None
    put.withdraw()
    bare = TransferPair(1, NBYTES)
    try:
        assert bare.producer.transfers.offer("request", bare.from_rows()).stow() is None
    finally:
        bare.close()


def test_gets_that_run_meanwhile_are_right_or_rejected_and_then_right(pair: TransferPair) -> None:
    """Each is asked for as its offer is stowed and its memory overwritten."""
    before, outcomes = pair.source.copy(), set()
    for _ in range(40):
        request = pair.name()
        offer = pair.producer.transfers.offer(request, pair.from_rows())
        grant = pair.consumer.transfers.get_async(
            pair.producer.node_id, request, pair.to_rows(), timeout=60.0
        )
        copies = offer.stow()
        if copies is None:
            eventually(offer.done, 30.0)  # it was quicker
        pair.source[:] = 0
        got = grant.wait(60.0)
        outcomes |= set(got.tolist())
        if not all_are(got, RowStatus.OK):
            assert set(got.tolist()) <= {RowStatus.OK, RowStatus.REJECTED}
            got = pair.consumer.transfers.get(pair.producer.node_id, request, pair.to_rows(), timeout=60.0)
            assert all_are(got, RowStatus.OK)
        assert np.array_equal(pair.target, before)
        pair.source[:] = before
        eventually(offer.done, 30.0)
        del copies
    assert outcomes


def test_two_calls_stow_it_once(pair: TransferPair) -> None:
    offer = pair.producer.transfers.offer(pair.name(), pair.from_rows())
    stowed = pair.producer.counters()["p2pkv_stowed_offers_total"]
    threads = [threading.Thread(target=offer.stow) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pair.producer.counters()["p2pkv_stowed_offers_total"] == stowed + 1
    offer.withdraw()
