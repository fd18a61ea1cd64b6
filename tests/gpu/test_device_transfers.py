"""Transfers from and to device memory: every byte right, whichever side is a device and however small the staging."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster import eventually
from device_buffers import DeviceBuffer
from fake_cuda import FakeCuda
from p2pkv import DeviceError, Node, NotRegisteredError, UsageError, _native
from p2pkv.transfers import RowStatus
from transfer_pair import random_rows, start_nodes

Allocate = Callable[[int], DeviceBuffer]
N, NBYTES = 64, 16384
STAGING = 256 * 1024
"""A quarter of what a request has."""


class Side:
    """A node's memory of ``N`` rows, in host or device memory."""

    def __init__(self, node: Node, place: str, allocate: Allocate, *, readable: bool) -> None:
        self.node = node
        self._buffer: DeviceBuffer | None = None
        if place == "device":
            self._buffer = allocate(N * NBYTES)
            self.address = self._buffer.address
            self.memory = node.register_memory(self._buffer.array, readable=readable)
        else:
            region = _native.SharedRegion.create(N * NBYTES)
            self._host = region.array
            self.address = region.address
            self.memory = node.register_address(region.address, region.nbytes, region, readable=readable)

    @property
    def rows(self) -> NDArray[np.int64]:
        spans = np.full((N, 2), NBYTES, np.int64)
        spans[:, 0] = self.address + np.arange(N) * NBYTES
        return spans

    def write(self, data: NDArray[np.uint8]) -> None:
        if self._buffer is not None:
            self._buffer.write(data)
        else:
            self._host[:] = data.reshape(-1)

    def read(self) -> NDArray[np.uint8]:
        flat = self._buffer.read() if self._buffer is not None else self._host
        return flat.reshape(N, NBYTES)


class Ends:
    """A producer and a consumer."""

    def __init__(self, nodes: list[Node], allocate: Allocate, from_: str, to: str) -> None:
        self.producer, self.consumer = nodes
        self.is_closed = False
        self.source = Side(self.producer, from_, allocate, readable=True)
        self.target = Side(self.consumer, to, allocate, readable=False)

    def fill(self, seed: int) -> NDArray[np.uint8]:
        data = random_rows(N, NBYTES, seed)
        self.source.write(data)
        return data

    def close(self) -> None:
        self.is_closed = True
        self.consumer.close()
        self.producer.close()

    def forget(self) -> None:
        """Let go of what the nodes gave out."""
        del self.source, self.target

    def staging_is_free(self) -> bool:
        return (
            self.producer.counters()["p2pkv_outgoing_staging_used_bytes"] == 0
            and self.consumer.counters()["p2pkv_incoming_staging_used_bytes"] == 0
        )


@pytest.fixture
def open_ends(cuda_settings: dict[str, Any], allocate: Allocate) -> Iterator[Callable[..., Ends]]:
    """Makes a producer and a consumer; they are closed when the test ends, and have all of their staging then."""
    opened: list[Ends] = []

    def open_ends(from_: str = "device", to: str = "device", **settings: Any) -> Ends:
        settings = {"device_staging_size": STAGING, "transports": ["shm", "tcp"], **cuda_settings, **settings}
        opened.append(Ends(start_nodes("producer", "consumer", **settings), allocate, from_, to))
        return opened[-1]

    yield open_ends
    for ends in opened:
        if not ends.is_closed:
            eventually(ends.staging_is_free, 10.0)
            ends.close()


def all_are(statuses: NDArray[np.uint8], status: RowStatus) -> bool:
    return set(statuses.tolist()) == {int(status)}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("from_", "to"), [("device", "device"), ("device", "host"), ("host", "device")])
def test_requests_larger_than_the_staging_arrive(
    open_ends: Callable[..., Ends], transport: str, from_: str, to: str
) -> None:
    ends = open_ends(from_, to, transports=[transport])
    expected = ends.fill(1)
    with ends.consumer.transfers.grant("put", ends.target.rows) as grant:
        put = ends.producer.transfers.put(ends.consumer.node_id, "put", ends.source.rows)
        assert all_are(put, RowStatus.OK)
        assert all_are(grant.wait(5.0), RowStatus.OK)
    assert np.array_equal(ends.target.read(), expected)
    expected = ends.fill(2)
    offer = ends.producer.transfers.offer("left", ends.source.rows)
    got = ends.consumer.transfers.get(ends.producer.node_id, "left", ends.target.rows)
    assert all_are(got, RowStatus.OK)
    assert all_are(offer.wait(5.0), RowStatus.OK)
    assert np.array_equal(ends.target.read(), expected)
    nbytes = 2 * N * NBYTES
    assert ends.producer.counters()["p2pkv_staged_to_host_bytes_total"] == (
        nbytes if from_ == "device" else 0
    )
    assert ends.consumer.counters()["p2pkv_staged_to_device_bytes_total"] == (nbytes if to == "device" else 0)


def test_rows_that_come_before_their_grant_are_copied_to_the_device(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends()
    expected = ends.fill(3)
    put = ends.producer.transfers.put(ends.consumer.node_id, "early", ends.source.rows)
    assert all_are(put, RowStatus.OK)
    assert all_are(ends.consumer.transfers.receive("early", ends.target.rows), RowStatus.OK)
    assert np.array_equal(ends.target.read(), expected)


def test_layers_are_offered_when_they_are_computed(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends()
    expected = ends.fill(4)
    offers = []
    with ends.consumer.transfers.grant("layers", ends.target.rows) as grant:
        for first in range(0, N, 16):
            rows = ends.source.rows[first : first + 16]
            offers.append(
                ends.producer.transfers.put_async(ends.consumer.node_id, "layers", rows, first_row=first)
            )
        assert all_are(grant.wait(5.0), RowStatus.OK)
    assert all(all_are(offer.wait(5.0), RowStatus.OK) for offer in offers)
    assert np.array_equal(ends.target.read(), expected)


def test_offers_and_grants_wait_for_the_streams_they_are_given(
    open_ends: Callable[..., Ends], allocate: Allocate, cuda_settings: dict[str, Any]
) -> None:
    source, target = allocate(N * NBYTES), allocate(N * NBYTES)
    ends = open_ends("host", "host")
    ends.producer.register_memory(source.array, readable=True)
    ends.consumer.register_memory(target.array)

    def rows(buffer: DeviceBuffer) -> NDArray[np.int64]:
        return np.array([[buffer.address, buffer.nbytes // 8]], np.int64)

    offer = ends.producer.transfers.offer("computed", rows(source), stream=source.fill_later(7))
    clearing = target.fill_later(9)  # would write over what came
    got = ends.consumer.transfers.get(
        ends.producer.node_id, "computed", rows(target), stream=clearing, timeout=30.0
    )
    assert all_are(got, RowStatus.OK)
    assert offer.done()
    assert set(target.read()[: target.nbytes // 8].tolist()) == {7}


def test_what_is_queued_after_a_call_is_not_waited_for(
    emulated: FakeCuda, open_ends: Callable[..., Ends], allocate: Allocate
) -> None:
    """An engine's stream is never idle: whoever waited for that would wait for ever."""
    ends, other = open_ends(), allocate(NBYTES)
    expected = ends.fill(11)
    source, target = emulated.stream(), emulated.stream()
    offer = ends.producer.transfers.offer("busy", ends.source.rows, stream=source)
    grant = ends.consumer.transfers.get_async(
        ends.producer.node_id, "busy", ends.target.rows, stream=target, timeout=5.0
    )
    emulated.hold(kernels=True)
    for stream in (source, target):
        emulated.launch_fill(stream, other.address, 1, NBYTES)
    assert all_are(grant.wait(5.0), RowStatus.OK)
    assert all_are(offer.wait(5.0), RowStatus.OK)
    assert np.array_equal(ends.target.read(), expected)
    emulated.let_go()
    for stream in (source, target):
        emulated.destroy_stream(stream)


def test_memory_that_was_not_registered_readable_is_not_offered(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends()
    with pytest.raises(NotRegisteredError, match="readable=True"):
        ends.consumer.transfers.offer("private", ends.target.rows)


def test_a_row_that_the_staging_has_no_room_for_is_refused_before_anything_happens(
    open_ends: Callable[..., Ends], allocate: Allocate
) -> None:
    ends = open_ends("host", "device")
    large = allocate(2 * STAGING)
    ends.producer.register_memory(large.array, readable=True)
    with pytest.raises(UsageError, match="the staging has room for 262144 of one row"):
        ends.producer.transfers.offer("large", np.array([[large.address, large.nbytes]], np.int64))
    # one that comes from a host gets through in pieces
    source, target = ends.source.rows[:1].copy(), ends.target.rows[:1].copy()
    source[0, 1] = target[0, 1] = N * NBYTES
    expected = ends.fill(12)
    ends.producer.transfers.offer("pieces", source)
    assert all_are(ends.consumer.transfers.get(ends.producer.node_id, "pieces", target), RowStatus.OK)
    assert np.array_equal(ends.target.read(), expected)


def test_an_address_of_a_device_is_known_for_what_it_is(
    open_ends: Callable[..., Ends], allocate: Allocate
) -> None:
    ends = open_ends("device", "host")
    plain = allocate(N * NBYTES)  # as engines give their tensors: an address and a length
    data = random_rows(N, NBYTES, 5)
    plain.write(data)
    memory = ends.producer.register_address(plain.address, plain.nbytes, plain, readable=True)
    spans = ends.source.rows
    spans[:, 0] += plain.address - ends.source.address
    ends.producer.transfers.offer("address", spans)
    got = ends.consumer.transfers.get(ends.producer.node_id, "address", ends.target.rows)
    assert all_are(got, RowStatus.OK)
    assert np.array_equal(ends.target.read(), data)
    memory.close()
    with pytest.raises(NotRegisteredError):
        ends.producer.transfers.offer("closed", spans)


def test_closing_the_memory_withdraws_and_revokes(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends()
    ends.fill(6)
    offer = ends.producer.transfers.offer("withdrawn", ends.source.rows)
    grant = ends.consumer.transfers.grant("revoked", ends.target.rows)
    ends.source.memory.close()
    ends.target.memory.close()
    assert all_are(offer.statuses(), RowStatus.REJECTED)
    assert all_are(grant.statuses(), RowStatus.CANCELED)


def test_copies_that_are_not_waited_for_are_seen_to_be_wrong(
    emulated: FakeCuda, open_ends: Callable[..., Ends]
) -> None:
    """Breaks the safeguard: what makes a row OK is that its copies are complete."""
    ends = open_ends("host", "device")
    expected = ends.fill(7)
    emulated.lie_about_events()
    emulated.hold(copies=True)
    ends.producer.transfers.offer("lie", ends.source.rows)
    got = ends.consumer.transfers.get(ends.producer.node_id, "lie", ends.target.rows)
    assert all_are(got, RowStatus.OK)
    assert not np.array_equal(ends.target.read(), expected)
    emulated.let_go()


def test_a_lost_device_fails_its_rows_says_so_once_and_leaves_the_rest_alone(
    emulated: FakeCuda, open_ends: Callable[..., Ends], caplog: pytest.LogCaptureFixture
) -> None:
    ends = open_ends()
    ends.fill(8)
    host = Side(ends.producer, "host", lambda _: pytest.fail("no device"), readable=True)
    into = Side(ends.consumer, "host", lambda _: pytest.fail("no device"), readable=False)
    host.write(random_rows(N, NBYTES, 9))
    emulated.lose()
    with caplog.at_level(logging.WARNING, logger="p2pkv.offers"):
        for request in ("lost", "lost again"):
            offer = ends.producer.transfers.put_async(ends.consumer.node_id, request, ends.source.rows)
            assert all_are(offer.wait(5.0), RowStatus.DEVICE_FAILED)
            assert all_are(offer.statuses(), RowStatus.DEVICE_FAILED)
    told = [record.getMessage() for record in caplog.records if "device memory" in record.getMessage()]
    assert len(told) == 1
    assert "CUDA device 0" in told[0]
    ends.producer.transfers.offer("host", host.rows)
    got = ends.consumer.transfers.get(ends.producer.node_id, "host", into.rows)
    assert all_are(got, RowStatus.OK)
    assert np.array_equal(into.read(), host.read())
    ends.close()  # the staging that the device might still write to is not given back


def test_no_staging_is_a_refusal_that_says_why(
    emulated: FakeCuda, cuda_settings: dict[str, Any], allocate: Allocate
) -> None:
    buffer = allocate(NBYTES)
    (node,) = start_nodes("alone", **cuda_settings)
    with node:
        emulated.fail("cuMemHostRegister", 2, nth=2)  # the first one is the page cache's
        with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            node.register_memory(buffer.array, readable=True)
        node.register_memory(buffer.array, readable=True)


def test_two_hundred_requests_leave_nothing_behind(
    emulated: FakeCuda, open_ends: Callable[..., Ends]
) -> None:
    before = emulated.counts().held
    ends = open_ends()
    expected = ends.fill(10)
    for i in range(200):
        grant = ends.consumer.transfers.grant(str(i), ends.target.rows[:8])
        offer = ends.producer.transfers.put_async(ends.consumer.node_id, str(i), ends.source.rows[:8])
        if i % 3 == 0:
            offer.withdraw()
        if i % 3 == 1:
            grant.revoke()
        is_right = grant.wait(5.0) == RowStatus.OK
        assert i % 3 != 2 or is_right.all()
        assert np.array_equal(ends.target.read()[:8][is_right], expected[:8][is_right])
        offer.withdraw()
    del grant, offer
    assert ends.producer.counters()["p2pkv_open_offers"] == 0
    assert ends.consumer.counters()["p2pkv_open_grants"] == 0
    eventually(ends.staging_is_free, 10.0)
    ends.close()
    ends.forget()
    contexts, *others = emulated.counts().held
    assert (contexts - 2, *others) == before  # the two buffers are there still
