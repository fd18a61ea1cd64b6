"""Rows from device to device over cuda_ipc: every byte right, and what can't go so goes through staging.

Between processes the emulated driver has both kinds of memory. It is stricter than NVIDIA's: who reads memory that its
owner has freed loses its context.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cluster import Cluster, NodeProcess, eventually
from device_ends import NBYTES, Ends, N
from fake_cuda import FakeCuda, fake_cuda
from p2pkv import _native
from p2pkv.transfers import RowStatus
from p2pkv.transports.cuda_ipc import CudaIpcTransport

ROWS: dict[str, Any] = {"n": N, "nbytes": NBYTES}
_OUT_OF_MEMORY = 2
PATIENCE = 30.0


@pytest.fixture
def open_ends(emulated: FakeCuda) -> Iterator[Callable[..., Ends]]:
    before = fake_cuda().counts()
    opened: list[Ends] = []

    def open_ends(**settings: Any) -> Ends:
        opened.append(Ends(transports=["cuda_ipc", "tcp"], **settings))
        return opened[-1]

    yield open_ends
    for ends in opened:
        ends.close()
    after = fake_cuda().counts()
    assert after.mappings == before.mappings, "a peer's memory is still mapped"
    assert after.freed_while_mapped == before.freed_while_mapped


def test_rows_go_from_device_to_device_and_nothing_is_staged(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends()
    ends.meet()
    expected = ends.fill(2)
    offer = ends.producer.transfers.offer("left", ends.rows(0))
    got = ends.consumer.transfers.get(ends.producer.node_id, "left", ends.rows(1))
    assert not got.any(), got
    assert not offer.wait(5.0).any()
    assert np.array_equal(ends.buffers[1].read().reshape(N, NBYTES), expected)
    assert ends.went() == (N * NBYTES, 0, 0)


def test_a_kernel_is_waited_for_on_both_sides(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends()
    ends.meet()
    ends.hand_over_behind_kernels()
    assert ends.went() == (2 * N * NBYTES, 0, 0)


def test_rows_behind_two_streams_wait_for_their_own(
    emulated: FakeCuda, open_ends: Callable[..., Ends]
) -> None:
    """The second half of the rows is put while the first half's stream is waited for, and its own takes longer."""
    ends = open_ends()
    ends.meet()
    halves = [slice(0, N // 2), slice(N // 2, N)]
    streams = [emulated.stream(0) for _ in halves]
    offers = []
    with ends.consumer.transfers.grant("both", ends.rows(1), timeout=PATIENCE) as grant:
        for half, stream, delay_us in zip(halves, streams, (100_000, 500_000), strict=True):
            address = ends.buffers[0].address + half.start * NBYTES
            emulated.launch_fill(stream, address, 0x5A, N // 2 * NBYTES, delay_us=delay_us)
            rows = ends.rows(0)[half]
            offers.append(
                ends.producer.transfers.put_async(
                    ends.consumer.node_id, "both", rows, first_row=half.start, stream=stream
                )
            )
        assert not grant.wait(PATIENCE).any()
    assert (ends.buffers[1].read() == 0x5A).all()
    assert not any(offer.wait(PATIENCE).any() for offer in offers)
    assert ends.went() == (N * NBYTES, 0, 0)
    for stream in streams:
        emulated.destroy_stream(stream)


def test_a_kernel_copies_small_rows_if_it_may(emulated: FakeCuda, open_ends: Callable[..., Ends]) -> None:
    ends = open_ends(device_kernel_blocks=4)
    ends.meet()
    before = emulated.counts().kernel_slices
    spans = [ends.rows(side)[:: -1 if side else 1] for side in (0, 1)]  # so that no two rows are one copy
    expected = ends.fill(12)
    with ends.consumer.transfers.grant("small", spans[1], timeout=PATIENCE) as grant:
        assert not ends.producer.transfers.put(ends.consumer.node_id, "small", spans[0]).any()
        assert not grant.wait(PATIENCE).any()
    assert np.array_equal(ends.buffers[1].read().reshape(N, NBYTES)[::-1], expected)
    assert emulated.counts().kernel_slices - before == N * NBYTES // (8 << 10)


def test_rows_without_a_grant_are_staged_and_kept(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends(buffer_size="4MiB")
    expected = ends.fill(3)
    assert not ends.producer.transfers.put(ends.consumer.node_id, "early", ends.rows(0)).any()
    assert not ends.consumer.transfers.receive("early", ends.rows(1)).any()
    assert np.array_equal(ends.buffers[1].read().reshape(N, NBYTES), expected)
    assert ends.went()[:2] == (0, N * NBYTES)
    ends.hand_over("granted", 4)
    assert ends.went()[0] == N * NBYTES, "one that is staged does not speak for those after it"


def test_rows_for_host_memory_are_staged(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends()
    expected = ends.fill(5)
    target = np.zeros((N, NBYTES), np.uint8)
    ends.consumer.register_memory(target)
    spans = np.full((N, 2), NBYTES, np.int64)
    spans[:, 0] = target.ctypes.data + np.arange(N) * NBYTES
    with ends.consumer.transfers.grant("to host", spans) as grant:
        assert not ends.producer.transfers.put(ends.consumer.node_id, "to host", ends.rows(0)).any()
        assert not grant.wait(5.0).any()
    assert np.array_equal(target, expected)
    assert ends.went()[0] == 0


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_memory_that_can_not_be_mapped_is_staged_until_it_can(
    emulated: FakeCuda, open_ends: Callable[..., Ends], call: str
) -> None:
    ends = open_ends()
    emulated.fail(call, _OUT_OF_MEMORY, stays=True)
    for i in range(3):
        ends.hand_over(f"first {i}", 6)
    assert ends.went() == (0, 3 * N * NBYTES, 3 * N * NBYTES)
    emulated.reset()

    def goes_directly() -> bool:
        ends.hand_over("again", 7)
        return ends.went()[0] > 0

    eventually(goes_directly, 20.0)


def test_memory_that_can_not_be_shared_is_staged(emulated: FakeCuda, open_ends: Callable[..., Ends]) -> None:
    emulated.fail("cuMemExportToShareableHandle", _OUT_OF_MEMORY, nth=1)
    ends = open_ends()
    ends.hand_over("put", 8)
    assert ends.went() == (0, N * NBYTES, N * NBYTES)


def test_a_withdrawn_offer_is_never_ok_though_its_bytes_are_being_copied(
    emulated: FakeCuda, open_ends: Callable[..., Ends]
) -> None:
    ends = open_ends()
    ends.hand_over("before", 9)
    with ends.consumer.transfers.grant("withdrawn", ends.rows(1), timeout=20.0) as grant:
        emulated.hold(copies=True)
        offer = ends.producer.transfers.put_async(ends.consumer.node_id, "withdrawn", ends.rows(0))
        eventually(lambda: emulated.counts().queued > 0, 10.0)
        assert set(offer.withdraw().tolist()) == {int(RowStatus.REJECTED)}
        ends.buffers[0].write(np.full((N, NBYTES), 0xEE, np.uint8))
        emulated.let_go()
        statuses = grant.wait(10.0)
    assert RowStatus.OK not in statuses.tolist()


def test_nothing_is_written_after_a_revocation(emulated: FakeCuda, open_ends: Callable[..., Ends]) -> None:
    ends = open_ends()
    ends.hand_over("before", 10)
    emulated.delay_copies(100_000)  # some times as long as it takes until somebody has looked again
    n_revoked = 0
    for i in itertools.count():
        grant = ends.consumer.transfers.grant(f"revoked {i}", ends.rows(1), timeout=20.0)
        offer = ends.producer.transfers.put_async(ends.consumer.node_id, f"revoked {i}", ends.rows(0))
        eventually(lambda offer=offer: emulated.counts().queued > 0 or offer.done(), 10.0)
        grant.revoke()
        ends.buffers[1].write(np.full((N, NBYTES), 0x77, np.uint8))
        n_revoked += bool(offer.wait(10.0).any())  # on a busy machine the rows may have come before
        assert (ends.buffers[1].read() == 0x77).all(), "written to after the revocation"
        if n_revoked == 3:
            break


def test_a_device_that_is_lost_fails_its_rows_alone(
    emulated: FakeCuda, open_ends: Callable[..., Ends]
) -> None:
    ends = open_ends()
    ends.hand_over("before", 11)
    with ends.consumer.transfers.grant("lost", ends.rows(1), timeout=10.0) as grant:
        emulated.hold(copies=True)
        offer = ends.producer.transfers.put_async(ends.consumer.node_id, "lost", ends.rows(0), lease=10.0)
        eventually(lambda: emulated.counts().queued > 0, 10.0)
        emulated.lose()
        emulated.hold()
        assert set(grant.wait(10.0).tolist()) == {int(RowStatus.DEVICE_FAILED)}
        assert RowStatus.OK not in offer.wait(10.0).tolist()
    ends.consumer.close()


# --- between processes ---


@pytest.fixture(params=["emulated", "emulated_virtual"])
def pair(
    request: pytest.FixtureRequest, kind: str, cuda_settings: dict[str, Any]
) -> Iterator[tuple[Cluster, NodeProcess, NodeProcess]]:
    """Two processes that map each other's memory: by its handle, or by a descriptor."""
    if kind != "emulated" and request.param != "emulated":
        pytest.skip("whether its memory goes by handle or descriptor is the library's choice")
    device = request.param if kind == "emulated" else kind
    with Cluster(transports=["cuda_ipc"], buffer_size=0, **cuda_settings) as cluster:
        options: dict[str, Any] = {"device": device, "readable": True, "in_memfd": True}
        nodes = [cluster.start(name, **options) for name in ("producer", "consumer")]
        cluster.meet(*nodes)
        hand_over_directly(nodes[0], nodes[1], "before")
        yield cluster, nodes[0], nodes[1]


def hand_over(producer: NodeProcess, consumer: NodeProcess, request: str, seed: int) -> None:
    consumer.call("grant", request=request, timeout=10.0, **ROWS)
    producer.call("offer", request=request, seed=seed, to=consumer.node_id, **ROWS)
    got = consumer.call("wait", request=request, timeout=10.0, seed=seed, nbytes=NBYTES)
    assert got["statuses"] == ["OK"]
    assert got["wrong"] == 0


def hand_over_directly(producer: NodeProcess, consumer: NodeProcess, request: str) -> None:
    """Hand over until it goes directly: the first rows may be staged before it is known that they need not be."""
    before = direct_bytes(consumer)
    seeds = itertools.count(1)

    def goes_directly() -> bool:
        seed = next(seeds)
        hand_over(producer, consumer, f"{request} {seed}", seed)
        return direct_bytes(consumer) >= before + N * NBYTES

    eventually(goes_directly, 5.0)


def direct_bytes(node: NodeProcess) -> float:
    return float(node.call("counters")["p2pkv_direct_bytes_total"])


Nodes = tuple[Cluster, NodeProcess, NodeProcess]


def test_processes_map_each_others_memory(pair: Nodes) -> None:
    # the first rows may have been staged before it was known that they need not be
    _, producer, consumer = pair
    before = [node.call("counters")["p2pkv_staged_to_host_bytes_total"] for node in (producer, consumer)]
    hand_over(producer, consumer, "there", 2)
    hand_over(consumer, producer, "back", 3)
    after = [node.call("counters")["p2pkv_staged_to_host_bytes_total"] for node in (producer, consumer)]
    assert after == before
    assert direct_bytes(producer) == N * NBYTES
    assert direct_bytes(consumer) >= N * NBYTES


def test_a_killed_producer_is_lost_and_another_takes_its_place(pair: Nodes) -> None:
    cluster, producer, consumer = pair
    consumer.call("grant", request="under way", timeout=10.0, source="producer", **ROWS)
    producer.send("offer", request="under way", seed=1, **ROWS)
    producer.kill()
    got = consumer.call("wait", request="under way", timeout=10.0, seed=1, nbytes=NBYTES)
    assert got["wrong"] == 0
    assert "PEER_LOST" in got["statuses"] or got["statuses"] == ["OK"]
    assert got["seconds"] < 5.0
    again = cluster.start("again", device=producer.settings["device"], readable=True, in_memfd=True)
    cluster.meet(again, consumer)
    hand_over_directly(again, consumer, "after")


def test_a_killed_receiver_costs_its_own_rows(pair: Nodes) -> None:
    cluster, producer, consumer = pair
    consumer.stop()
    producer.call("offer", request="under way", seed=1, to="consumer", **ROWS)
    consumer.kill()
    assert producer.call("wait", request="under way", timeout=10.0)["statuses"] == ["PEER_LOST"]
    again = cluster.start("again", device=producer.settings["device"], readable=True, in_memfd=True)
    cluster.meet(producer, again)
    hand_over(producer, again, "after", 2)


def test_a_stopped_receiver_finds_a_withdrawn_offer_rejected(pair: Nodes) -> None:
    _, producer, consumer = pair
    consumer.call("grant", request="late", timeout=20.0, **ROWS)
    consumer.stop()
    producer.call("offer", request="late", seed=1, to="consumer", lease=0.5, **ROWS)
    assert producer.call("wait", request="late", timeout=10.0)["statuses"] == ["TIMED_OUT"]
    producer.call("offer", request="something else", seed=2, to="consumer", **ROWS)  # over the same memory
    consumer.resume()
    got = consumer.call("wait", request="late", timeout=10.0, seed=1, nbytes=NBYTES)
    assert "OK" not in got["statuses"]
    assert got["wrong"] == 0


def test_closed_memory_is_mapped_by_nobody_when_it_is_freed(pair: Nodes) -> None:
    _, producer, consumer = pair
    if producer.settings["device"] != "emulated":
        pytest.skip("memory that goes by a descriptor may be freed at any time")
    assert producer.call("free_device")["freed_while_mapped"] == 0
    assert consumer.call("counters")["p2pkv_open_grants"] == 0


def test_a_stopped_reader_does_not_hold_up_the_closing_of_memory(pair: Nodes) -> None:
    _, producer, consumer = pair
    consumer.stop()
    told = producer.call("free_device")
    consumer.resume()
    assert told["seconds"] > 0.5, "it was asked for its mapping, and not waited for"
    assert told["seconds"] < 1.0 + 0.5


# --- the transport itself ---


def test_the_driver_decides_whether_it_can_run(emulated: FakeCuda) -> None:
    _native.cuda_use_library(emulated.path)
    assert CudaIpcTransport.unavailable() is None
