"""Transfers of more rows than a message has are one transfer to whoever calls."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from p2pkv import NotRegisteredError
from p2pkv.transfers import RowStatus
from transfer_pair import TransferPair

PART = 32768
N = 2 * PART + 100
NBYTES = 16
FAR_S = 60.0


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[TransferPair]:
    pair = TransferPair(N, NBYTES, deadline=FAR_S, buffer_size="16MiB")
    yield pair
    pair.close()


@pytest.fixture
def pair(shared_pair: TransferPair) -> Iterator[TransferPair]:
    yield shared_pair
    assert shared_pair.producer.counters()["p2pkv_open_offers"] == 0
    assert shared_pair.consumer.counters()["p2pkv_open_grants"] == 0


def test_a_put_goes_straight_to_where_it_is_granted(pair: TransferPair) -> None:
    name = pair.name()
    with pair.consumer.transfers.grant(name, pair.to_rows()) as grant:
        put = pair.producer.transfers.put(pair.consumer.node_id, name, pair.from_rows())
        got = grant.wait(FAR_S)
    assert len(put) == len(got) == N
    assert not put.any()
    assert not got.any()
    assert pair.is_right()


def test_what_nobody_granted_is_received(pair: TransferPair) -> None:
    name = pair.name()
    assert not pair.producer.transfers.put(pair.consumer.node_id, name, pair.from_rows()).any()
    assert not pair.consumer.transfers.receive(name, pair.to_rows()).any()
    assert pair.is_right()


def test_a_get_takes_what_was_offered_and_ends_the_offer(pair: TransferPair) -> None:
    name = pair.name()
    offer = pair.producer.transfers.offer(name, pair.from_rows())
    assert not pair.consumer.transfers.get(pair.producer.node_id, name, pair.to_rows()).any()
    assert not offer.wait(FAR_S).any()
    assert offer.done()
    assert pair.is_right()


def test_a_get_is_not_done_before_its_last_row_is(pair: TransferPair) -> None:
    name = pair.name()
    first = pair.producer.transfers.offer(name, pair.from_rows(0, PART))
    get = pair.consumer.transfers.get_async(pair.producer.node_id, name, pair.to_rows())
    first.wait(FAR_S)
    assert first.done()
    assert not get.done()
    assert (get.statuses()[PART:] == RowStatus.PENDING).all()
    rest = pair.producer.transfers.offer(name, pair.from_rows(PART), first_row=PART)
    assert not get.wait(FAR_S).any()
    rest.wait(FAR_S)
    assert pair.is_right()


def test_a_get_ends_as_a_whole_at_its_deadline(pair: TransferPair) -> None:
    name = pair.name()
    first = pair.producer.transfers.offer(name, pair.from_rows(0, PART))
    got = pair.consumer.transfers.get(pair.producer.node_id, name, pair.to_rows(), timeout=1.0)
    first.withdraw()
    assert (got[PART:] == RowStatus.TIMED_OUT).all()
    late = pair.producer.transfers.offer(name, pair.from_rows(PART), first_row=PART)
    pair.target[:] = 7
    late.withdraw()
    assert (pair.target == 7).all()


@pytest.mark.parametrize("first", [0, PART + 5, N - 1])
def test_a_get_of_some_rows_ends_the_whole_offer(pair: TransferPair, first: int) -> None:
    name = pair.name()
    offer = pair.producer.transfers.offer(name, pair.from_rows())
    got = pair.consumer.transfers.get(pair.producer.node_id, name, pair.to_rows(first, 1), first_row=first)
    assert not got.any()
    assert pair.is_right(first, 1)
    told = offer.wait(FAR_S)
    assert offer.done()
    assert told[first] == RowStatus.OK
    assert (np.delete(told, first) == RowStatus.OUT_OF_RANGE).all()


def test_what_is_revoked_is_all_revoked(pair: TransferPair) -> None:
    name = pair.name()
    get = pair.consumer.transfers.get_async(pair.producer.node_id, name, pair.to_rows())
    assert (get.revoke() == RowStatus.CANCELED).all()
    assert get.done()
    offer = pair.producer.transfers.offer(name, pair.from_rows())
    assert (offer.withdraw() == RowStatus.REJECTED).all()
    assert offer.done()


def test_a_withdrawn_offer_is_gone_as_a_whole(pair: TransferPair) -> None:
    name = pair.name()
    pair.producer.transfers.offer(name, pair.from_rows()).withdraw()
    got = pair.consumer.transfers.get(pair.producer.node_id, name, pair.to_rows())
    assert (got == RowStatus.GONE).all()


def test_a_row_that_is_refused_leaves_nothing_of_the_others(pair: TransferPair) -> None:
    name = pair.name()
    from_rows, to_rows = pair.from_rows(), pair.to_rows()
    from_rows[PART + 7, 0] = to_rows[PART + 7, 0] = 4096
    with pytest.raises(NotRegisteredError, match=f"row {PART + 7}"):
        pair.producer.transfers.offer(name, from_rows)
    with pytest.raises(NotRegisteredError, match=f"row {PART + 7}"):
        pair.consumer.transfers.grant(name, to_rows)
    with pytest.raises(NotRegisteredError, match=f"row {PART + 7}"):
        pair.consumer.transfers.get_async(pair.producer.node_id, name, to_rows)
