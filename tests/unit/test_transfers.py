"""Transfers between two nodes of this process: what each call promises."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from cluster import UCX, eventually
from p2pkv import (
    ClosedError,
    _native,
)
from p2pkv.testing.lateness import returns_within
from p2pkv.transfers import RowStatus
from transfer_pair import TransferPair, all_are, random_rows, spans_of, start_nodes

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
    assert shared_pair.counter("p2pkv_receive_buffer_used_bytes") == 0


def test_a_put_goes_straight_to_where_it_is_granted(pair: TransferPair) -> None:
    request = pair.name()
    granted = pair.counter("p2pkv_granted_rows_total")
    with pair.consumer.transfers.grant(request, pair.to_rows()) as grant:
        put = pair.producer.transfers.put(pair.consumer.node_id, request, pair.from_rows())
        assert all_are(put, RowStatus.OK)
        assert all_are(grant.wait(60.0), RowStatus.OK)
        assert grant.done()
        assert pair.is_right()
    assert pair.counter("p2pkv_granted_rows_total") == granted + N


@pytest.mark.parametrize("transport", ["shm", UCX])
def test_other_transports_carry_transfers(transport: str) -> None:
    producer, consumer = start_nodes("producer", "consumer", transports=[transport, "tcp"])
    with producer, consumer:
        region = _native.SharedRegion.create(N * NBYTES)
        producer.register_address(region.address, region.nbytes, region, readable=True)
        source = region.array.reshape(N, NBYTES)
        source[:] = random_rows(N, NBYTES)
        target = np.zeros_like(source)
        consumer.register_memory(target)
        producer.transfers.offer("over it", spans_of(source))
        got = consumer.transfers.get(producer.node_id, "over it", spans_of(target))
        assert all_are(got, RowStatus.OK)
        assert np.array_equal(source, target)


def test_memory_that_the_best_transport_cannot_read_goes_over_the_next() -> None:
    producer, consumer = start_nodes("producer", "consumer", transports=["shm", "tcp"])
    with producer, consumer:
        source, target = random_rows(N, NBYTES), np.zeros((N, NBYTES), np.uint8)
        producer.register_memory(source, readable=True)
        consumer.register_memory(target)
        producer.transfers.offer("plain memory", spans_of(source))
        got = consumer.transfers.get(producer.node_id, "plain memory", spans_of(target))
        assert all_are(got, RowStatus.OK)
        assert np.array_equal(source, target)


def test_a_get_takes_what_was_offered_and_ends_the_offer(pair: TransferPair) -> None:
    request = pair.name()
    offer = pair.producer.transfers.offer(request, pair.from_rows())
    assert not offer.done()
    assert all_are(offer.statuses(), RowStatus.PENDING)
    got = pair.consumer.transfers.get(pair.producer.node_id, request, pair.to_rows())
    assert all_are(got, RowStatus.OK)
    assert pair.is_right()
    assert offer.done()
    assert all_are(offer.wait(0), RowStatus.OK)
    assert pair.is_refused_at_once(request)


def test_a_get_waits_for_rows_that_are_offered_later(pair: TransferPair) -> None:
    request = pair.name()
    got = pair.consumer.transfers.get_async(pair.producer.node_id, request, pair.to_rows())
    offers = []
    for first in range(0, N, 16):
        assert not got.done()
        offers.append(pair.producer.transfers.offer(request, pair.from_rows(first, 16), first_row=first))
        offers[-1].wait(5.0)
        assert offers[-1].done()
    assert all_are(got.wait(60.0), RowStatus.OK)
    assert pair.is_right()


def test_a_get_may_take_some_of_the_rows(pair: TransferPair) -> None:
    request = pair.name()
    offer = pair.producer.transfers.offer(request, pair.from_rows())
    got = pair.consumer.transfers.get(pair.producer.node_id, request, pair.to_rows(8, 4), first_row=8)
    assert all_are(got, RowStatus.OK, 4)
    assert pair.is_right(8, 4)
    assert not pair.target[:8].any()
    assert not pair.target[12:].any()
    assert offer.done()
    assert all_are(offer.statuses()[8:12], RowStatus.OK, 4)


def test_a_get_that_finds_nothing_returns_at_its_deadline_and_harms_nothing(pair: TransferPair) -> None:
    request = pair.name()
    with returns_within(0.2 + 0.1) as late:
        got = pair.consumer.transfers.get(pair.producer.node_id, request, pair.to_rows(), timeout=0.2)
    assert late.seconds >= 0.2
    assert all_are(got, RowStatus.TIMED_OUT)
    offer = pair.producer.transfers.offer(request, pair.from_rows())
    assert all_are(pair.consumer.transfers.get(pair.producer.node_id, request, pair.to_rows()), RowStatus.OK)
    assert offer.done()


def test_what_nobody_granted_goes_into_the_buffer_and_is_received(pair: TransferPair) -> None:
    request = pair.name()
    put = pair.producer.transfers.put(pair.consumer.node_id, request, pair.from_rows())
    assert all_are(put, RowStatus.OK)
    eventually(lambda: pair.counter("p2pkv_receive_buffer_used_bytes") >= N * NBYTES, 5.0)
    pair.source[:] = np.roll(pair.source, 1)  # the memory is the producer's again
    received = pair.consumer.transfers.receive(request, pair.to_rows())
    pair.source[:] = np.roll(pair.source, -1)
    assert all_are(received, RowStatus.OK)
    assert pair.is_right()


def test_rows_that_come_before_and_after_the_grant_all_arrive(pair: TransferPair) -> None:
    request = pair.name()
    half = N // 2
    first = pair.producer.transfers.put(pair.consumer.node_id, request, pair.from_rows(0, half))
    grant = pair.consumer.transfers.grant(request, pair.to_rows())
    second = pair.producer.transfers.put(pair.consumer.node_id, request, pair.from_rows(half), first_row=half)
    assert all_are(first, RowStatus.OK, half)
    assert all_are(second, RowStatus.OK, half)
    assert all_are(grant.wait(60.0), RowStatus.OK)
    assert pair.is_right()


def test_the_buddy_pool_takes_what_the_buffer_cannot_and_the_rest_waits_with_the_producer() -> None:
    pair = TransferPair(48, NBYTES, buffer_size=16 * NBYTES, buddy_pool_size=16 * NBYTES)
    try:
        to = pair.consumer.node_id
        request = pair.name()
        offers = [
            pair.producer.transfers.put_async(to, request, pair.from_rows(first, 16), first_row=first)
            for first in (0, 16, 32)
        ]
        assert all_are(offers[0].wait(60.0), RowStatus.OK, 16)
        assert all_are(offers[1].wait(60.0), RowStatus.OK, 16)
        eventually(lambda: pair.counter("p2pkv_parked_offers_total") == 1, 5.0)
        assert not offers[2].done()
        # The receiver knows a moment later than the producer.
        eventually(lambda: pair.counter("p2pkv_buffered_rows_total") == 16, 5.0)
        eventually(lambda: pair.counter("p2pkv_pooled_rows_total") == 16, 5.0)
        received = pair.consumer.transfers.receive(request, pair.to_rows())
        assert all_are(received, RowStatus.OK, 48)
        assert pair.is_right()
        assert all_are(offers[2].wait(60.0), RowStatus.OK, 16)
        assert pair.counter("p2pkv_receive_buffer_used_bytes") == 0
        assert pair.counter("p2pkv_buddy_pool_used_bytes") == 0
    finally:
        pair.close()


def test_a_put_that_waits_with_the_producer_can_be_got() -> None:
    pair = TransferPair(8, NBYTES, buffer_size=0)
    try:
        request = pair.name()
        offer = pair.producer.transfers.put_async(pair.consumer.node_id, request, pair.from_rows())
        eventually(lambda: pair.counter("p2pkv_parked_offers_total") == 1, 5.0)
        got = pair.consumer.transfers.get(pair.producer.node_id, request, pair.to_rows())
        assert all_are(got, RowStatus.OK, 8)
        assert pair.is_right()
        assert all_are(offer.wait(60.0), RowStatus.OK, 8)
    finally:
        pair.close()


def test_a_put_for_which_there_is_no_room_times_out_and_is_withdrawn() -> None:
    pair = TransferPair(8, NBYTES, buffer_size=0)
    try:
        request = pair.name()
        with returns_within(0.3 + 0.1) as late:
            put = pair.producer.transfers.put(pair.consumer.node_id, request, pair.from_rows(), timeout=0.3)
        assert late.seconds >= 0.3
        assert all_are(put, RowStatus.TIMED_OUT, 8)
        received = pair.consumer.transfers.receive(request, pair.to_rows(), timeout=0.2)
        assert not (received == RowStatus.OK).any()
        assert not pair.target.any()
    finally:
        pair.close()


def test_unclaimed_rows_expire() -> None:
    pair = TransferPair(8, NBYTES, transfer_lease=0.3)
    try:
        put = pair.producer.transfers.put(pair.consumer.node_id, pair.name(), pair.from_rows())
        assert all_are(put, RowStatus.OK, 8)
        eventually(lambda: pair.counter("p2pkv_expired_rows_total") == 8, 5.0)
        assert pair.counter("p2pkv_receive_buffer_used_bytes") == 0
    finally:
        pair.close()


def test_puts_of_a_request_are_pulled_in_order(pair: TransferPair) -> None:
    request = pair.name()
    offers = [
        pair.producer.transfers.put_async(pair.consumer.node_id, request, pair.from_rows(i, 1), first_row=i)
        for i in range(N)
    ]
    done = [False] * N
    while not all(done):
        done = [offer.done() for offer in reversed(offers)][::-1]
        assert done == sorted(done, reverse=True), "a later offer was done before an earlier one"
    assert all_are(pair.consumer.transfers.receive(request, pair.to_rows()), RowStatus.OK)
    assert pair.is_right()


def test_rows_from_several_memories_on_both_sides_arrive(pair: TransferPair) -> None:
    layers = [random_rows(4, 1000, seed) for seed in range(3)]
    targets = [np.zeros_like(layer) for layer in layers]
    memories = [pair.producer.register_memory(layer, readable=True) for layer in layers]
    memories += [pair.consumer.register_memory(target) for target in targets]
    request = pair.name()
    offer = pair.producer.transfers.offer(request, np.concatenate([spans_of(layer) for layer in layers]))
    spans = np.concatenate([spans_of(target) for target in targets])
    got = pair.consumer.transfers.get(pair.producer.node_id, request, spans)
    assert all_are(got, RowStatus.OK, 12)
    assert all(np.array_equal(layer, target) for layer, target in zip(layers, targets, strict=True))
    assert offer.done()
    for memory in memories:
        memory.close()


def test_a_row_that_came_already_is_a_duplicate(pair: TransferPair) -> None:
    request = pair.name()
    to = pair.consumer.node_id
    assert all_are(pair.producer.transfers.put(to, request, pair.from_rows()), RowStatus.OK)
    again = pair.producer.transfers.put(to, request, pair.from_rows(8, 8), first_row=8)
    assert all_are(again, RowStatus.DUPLICATE, 8)
    grant = pair.consumer.transfers.grant(request, np.concatenate([pair.to_rows(), pair.to_rows(0, 1)]))
    eventually(lambda: int((grant.statuses() == RowStatus.OK).sum()) == N, 5.0)
    again = pair.producer.transfers.put(to, request, pair.from_rows(0, 1))
    assert all_are(again, RowStatus.DUPLICATE, 1)
    grant.revoke()
    assert pair.is_right(1)


def test_rows_of_other_lengths_and_numbers_are_out_of_range_and_harm_no_others(pair: TransferPair) -> None:
    request = pair.name()
    spans = pair.to_rows()
    spans[3, 1] -= 1
    with pair.consumer.transfers.grant(request, spans[:8]) as grant:
        put = pair.producer.transfers.put(pair.consumer.node_id, request, pair.from_rows())
        granted = grant.wait(60.0)
    assert put[3] == granted[3] == RowStatus.OUT_OF_RANGE
    assert all_are(put[8:], RowStatus.OUT_OF_RANGE, N - 8)
    assert all_are(np.delete(put[:8], 3), RowStatus.OK, 7)
    assert all_are(np.delete(granted, 3), RowStatus.OK, 7)
    assert pair.is_right(0, 3)
    assert not pair.target[3].any()
    assert pair.is_right(4, 4)
    assert not pair.target[8:].any()


def test_unknown_nodes_are_lost_peers(pair: TransferPair) -> None:
    with returns_within(1.0):
        put = pair.producer.transfers.put("nobody", pair.name(), pair.from_rows())
        assert all_are(put, RowStatus.PEER_LOST)
        assert pair.producer.transfers.put_async("nobody", pair.name(), pair.from_rows()).done()
        got = pair.consumer.transfers.get("nobody", pair.name(), pair.to_rows())
        assert all_are(got, RowStatus.PEER_LOST)


def test_a_node_can_transfer_to_itself(pair: TransferPair) -> None:
    memory = pair.producer.register_memory(target := np.zeros_like(pair.source))
    request = pair.name()
    with pair.producer.transfers.grant(request, spans_of(target)) as grant:
        put = pair.producer.transfers.put(pair.producer.node_id, request, pair.from_rows())
        assert all_are(grant.wait(60.0), RowStatus.OK)
    assert all_are(put, RowStatus.OK)
    assert np.array_equal(pair.source, target)
    memory.close()


def test_both_directions_work_at_the_same_time(pair: TransferPair) -> None:
    back = random_rows(N, NBYTES, 9)
    returned = np.zeros_like(back)
    memories = [
        pair.consumer.register_memory(back, readable=True),
        pair.producer.register_memory(returned),
    ]
    request = pair.name()
    there = pair.consumer.transfers.grant(request, pair.to_rows())
    here = pair.producer.transfers.grant(request, spans_of(returned))
    first = pair.producer.transfers.put_async(pair.consumer.node_id, request, pair.from_rows())
    second = pair.consumer.transfers.put_async(pair.producer.node_id, request, spans_of(back))
    for handle in (there, here, first, second):
        assert all_are(handle.wait(60.0), RowStatus.OK)
    assert pair.is_right()
    assert np.array_equal(back, returned)
    for memory in memories:
        memory.close()


def test_many_threads_share_a_pair(pair: TransferPair) -> None:
    problems: list[str] = []

    def work(row: int) -> None:
        for turn in range(20):
            request = f"thread {row} turn {turn}"
            grant = pair.consumer.transfers.grant(request, pair.to_rows(row, 1))
            put = pair.producer.transfers.put(pair.consumer.node_id, request, pair.from_rows(row, 1))
            if not (all_are(put, RowStatus.OK, 1) and all_are(grant.wait(60.0), RowStatus.OK, 1)):
                problems.append(f"{request}: {put} {grant.statuses()}")
            if not pair.is_right(row, 1):
                problems.append(f"{request}: wrong bytes")

    pair.name()
    threads = [threading.Thread(target=work, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_closing_memory_withdraws_and_revokes_what_lies_in_it(pair: TransferPair) -> None:
    source, target = random_rows(4, NBYTES), np.zeros((4, NBYTES), np.uint8)
    source_memory = pair.producer.register_memory(source, readable=True)
    target_memory = pair.consumer.register_memory(target)
    offer = pair.producer.transfers.offer("closing", spans_of(source))
    grant = pair.consumer.transfers.grant("closing", spans_of(target))
    source_memory.close()
    target_memory.close()
    assert all_are(offer.wait(0), RowStatus.REJECTED, 4)
    assert all_are(grant.wait(0), RowStatus.CANCELED, 4)


def test_a_dropped_grant_is_revoked_and_a_dropped_offer_stays(pair: TransferPair) -> None:
    request = pair.name()
    pair.consumer.transfers.grant(request, pair.to_rows())  # dropped at once
    assert pair.counter("p2pkv_open_grants") == 0
    pair.producer.transfers.offer(request, pair.from_rows())
    got = pair.consumer.transfers.get(pair.producer.node_id, request, pair.to_rows())
    assert all_are(got, RowStatus.OK)


def test_a_closing_node_ends_waits_on_both_sides() -> None:
    pair = TransferPair(8, NBYTES, buffer_size=0, deadline=30.0)
    offer = pair.producer.transfers.put_async(pair.consumer.node_id, "never granted", pair.from_rows())
    grant = pair.consumer.transfers.grant("never put", pair.to_rows())
    waiter = threading.Thread(target=grant.wait, args=(30.0,))
    waiter.start()
    pair.consumer.close()
    waiter.join(60.0)
    assert not waiter.is_alive()
    assert all_are(grant.statuses(), RowStatus.CANCELED, 8)
    assert all_are(offer.wait(60.0), RowStatus.PEER_LOST, 8)
    with pytest.raises(ClosedError):
        pair.consumer.transfers.grant("late", pair.to_rows())
    pair.close()
