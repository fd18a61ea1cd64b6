"""Offers that are over, taken, withdrawn or lapsed: both sides know, and whoever asks for them is told so at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cluster import eventually
from p2pkv.transfers import RowStatus
from transfer_pair import TransferPair, all_are, spans_of

N = 64
NBYTES = 4096


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[TransferPair]:
    pair = TransferPair(N, NBYTES)
    yield pair
    pair.close()


@pytest.fixture
def pair(shared_pair: TransferPair) -> Iterator[TransferPair]:
    """The pair all tests of this module share: each leaves it without offers and grants."""
    yield shared_pair
    assert shared_pair.producer.counters()["p2pkv_open_offers"] == 0
    assert shared_pair.counter("p2pkv_open_grants") == 0


def test_an_offer_ends_with_its_lease(pair: TransferPair) -> None:
    request = pair.name()
    offer = pair.producer.transfers.offer(request, pair.from_rows(), lease=0.1)
    assert all_are(offer.wait(5.0), RowStatus.TIMED_OUT)
    assert pair.is_refused_at_once(request)
    assert not pair.target.any()


def test_a_withdrawn_offer_is_gone(pair: TransferPair) -> None:
    request = pair.name()
    offer = pair.producer.transfers.offer(request, pair.from_rows())
    assert all_are(offer.withdraw(), RowStatus.REJECTED)
    assert offer.done()
    assert all_are(offer.withdraw(), RowStatus.REJECTED)
    assert pair.is_refused_at_once(request)


def test_what_is_offered_anew_is_there_again(pair: TransferPair) -> None:
    request = pair.name()
    pair.producer.transfers.offer(request, pair.from_rows()).withdraw()
    renewed = pair.producer.transfers.offer(request, pair.from_rows(16, 16), first_row=16)
    got = pair.consumer.transfers.get(pair.producer.node_id, request, pair.to_rows())
    assert all_are(got[16:32], RowStatus.OK, 16)
    assert all_are(np.delete(got, slice(16, 32)), RowStatus.GONE, N - 16)
    assert renewed.done()
    assert pair.is_right(16, 16)


def test_a_get_waits_for_the_rows_that_were_never_offered_and_for_no_others(pair: TransferPair) -> None:
    request = pair.name()
    pair.producer.transfers.offer(request, pair.from_rows(0, 16)).withdraw()
    got = pair.consumer.transfers.get_async(pair.producer.node_id, request, pair.to_rows())
    eventually(lambda: all_are(got.statuses()[:16], RowStatus.GONE, 16), 10.0)
    assert all_are(got.statuses()[16:], RowStatus.PENDING, N - 16)
    pair.producer.transfers.offer(request, pair.from_rows(16), first_row=16)
    assert all_are(got.wait(60.0)[16:], RowStatus.OK, N - 16)


@pytest.mark.parametrize("is_offered_first", [True, False])
@pytest.mark.parametrize("n_first", [N, 1])
def test_of_two_gets_for_one_offer_the_first_has_it_and_the_other_hears_so(
    pair: TransferPair, n_first: int, is_offered_first: bool
) -> None:
    other = np.zeros_like(pair.target)
    with pair.consumer.register_memory(other):
        for _ in range(20):
            request = pair.name()
            if is_offered_first:
                offer = pair.producer.transfers.offer(request, pair.from_rows())
            asked = [
                pair.consumer.transfers.get_async(pair.producer.node_id, request, rows, timeout=60.0)
                for rows in (pair.to_rows(0, n_first), spans_of(other)[: N + 1 - n_first])
            ]
            if not is_offered_first:
                offer = pair.producer.transfers.offer(request, pair.from_rows())
            first, second = (grant.wait(30.0) for grant in asked)
            assert all_are(first, RowStatus.OK, n_first)
            assert pair.is_right(0, n_first)
            assert all_are(second, RowStatus.GONE, N + 1 - n_first)
            assert offer.wait(30.0)[0] == RowStatus.OK
    assert not other.any()


def test_what_the_first_of_two_gets_leaves_the_other_has(pair: TransferPair) -> None:
    other = np.zeros_like(pair.target)
    n_left = 0
    with pair.consumer.register_memory(other):
        for _ in range(60):
            request = pair.name()
            other[:] = 0
            offer = pair.producer.transfers.offer(request, pair.from_rows())
            first, second = (
                pair.consumer.transfers.get_async(pair.producer.node_id, request, rows, timeout=60.0)
                for rows in (pair.to_rows(), spans_of(other))
            )
            first.revoke()
            had = second.wait(30.0)
            if all_are(had, RowStatus.OK):
                n_left += 1
                assert np.array_equal(other, pair.source)
            else:  # the first had it before it was revoked
                assert all_are(had, RowStatus.GONE)
            assert all_are(offer.wait(30.0), RowStatus.OK)
    assert n_left > 0


def test_what_is_over_is_remembered_for_a_lease() -> None:
    lease = 2.0
    pair = TransferPair(4, NBYTES, transfer_lease=lease)
    request = ""

    def is_remembered() -> bool:
        """Ask for one more that is over, which may take a busy machine longer than the lease."""
        nonlocal request
        request = pair.name()
        pair.producer.transfers.offer(request, pair.from_rows()).withdraw()
        got = pair.consumer.transfers.get(pair.producer.node_id, request, pair.to_rows(), timeout=lease)
        assert set(got.tolist()) <= {int(RowStatus.GONE), int(RowStatus.TIMED_OUT)}
        return all_are(got, RowStatus.GONE, 4)

    def is_forgotten() -> bool:
        got = pair.consumer.transfers.get(pair.producer.node_id, request, pair.to_rows(), timeout=0.05)
        return all_are(got, RowStatus.TIMED_OUT, 4)

    eventually(is_remembered, 10.0)
    eventually(is_forgotten, 10.0)
    pair.close()


def test_withdrawing_what_was_taken_says_so(pair: TransferPair) -> None:
    request = pair.name()
    offer = pair.producer.transfers.offer(request, pair.from_rows())
    pair.consumer.transfers.get(pair.producer.node_id, request, pair.to_rows())
    assert all_are(offer.withdraw(), RowStatus.OK)
