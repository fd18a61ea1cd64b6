"""The contract suite of transports: every rule of :mod:`p2pkv.transports.base` as a test.

A package that has a transport of its own runs it like this, and nothing more::

    # test_my_transport.py
    from p2pkv.testing.transport_contract import TransportContract
    from my_package import MyTransport

    class TestMyTransport(TransportContract):
        factory = "my_package:MyTransport"      # importable by a child process as well

``factory`` is ``module:callable`` without arguments; the callable makes a new, independent transport each
time. Set ``crosses_processes = False`` for one that stays within a process. Seeds are printed;
``P2PKV_TEST_SEED`` replays one.
"""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pkv.errors import P2PKVError, TransportError, UsageError
from p2pkv.testing.transport_faults import FaultRules
from p2pkv.testing.transport_fixtures import ENOUGH, Reader, eventually, settled
from p2pkv.testing.transport_peer import N_PAGES, NBYTES, PAGE, TABLE, PagedMemory, page_spans, page_words
from p2pkv.transports.base import NO_WORD, Endpoint, RemoteRegion, Spans, Status, Transport


class TransportContract(FaultRules):
    """Subclass it and set ``factory``."""

    # --- reads ---

    def test_two_transports_of_a_host_share_a_domain(self, owner: Transport, reader: Reader) -> None:
        assert owner.domain == reader.transport.domain
        assert type(owner).unavailable() is None

    def test_spans_are_read_exactly_and_nothing_else_is_written(
        self, memory: PagedMemory, reader: Reader, pair: tuple[Endpoint, RemoteRegion], rng: random.Random
    ) -> None:
        endpoint, remote = pair
        memory.bytes[TABLE:] = np.random.default_rng(rng.randrange(2**32)).integers(
            0, 256, NBYTES - TABLE, np.uint8
        )
        for n_spans in (1, 3, 64, 300):
            reader.bytes[:] = 0xEE
            expected = reader.bytes.copy()
            step = NBYTES // n_spans
            spans = np.array(
                [
                    (i * step, rng.randrange(NBYTES - step + 1), rng.choice((0, 1, 7, step // 2, step - 1)))
                    for i in range(n_spans)
                ],
                np.int64,
            )
            for local, offset, length in spans.tolist():
                expected[local : local + length] = memory.bytes[offset : offset + length]
            statuses = endpoint.read(reader.local, remote, spans, words=None).wait(ENOUGH)
            assert (statuses == Status.OK).all(), settled(statuses)
            assert np.array_equal(reader.bytes, expected)

    def test_an_end_that_accepted_can_be_read_by_both_halves(
        self, owner: Transport, memory: PagedMemory, reader: Reader
    ) -> None:
        ours, theirs = reader.transport.open(), owner.open()
        ours.bind(theirs.describe())
        theirs.bind(ours.describe())
        remote = ours.attach(memory.region.describe())
        statuses = ours.read(reader.local, remote, page_spans([3]), words=page_words([3], [2])).wait(ENOUGH)
        assert settled(statuses) == ["OK"]

        own = PagedMemory(reader.transport)
        back = np.zeros(PAGE, np.uint8)
        with owner.register_memory(back, back.ctypes.data, PAGE, readable=False) as local:
            remote = theirs.attach(own.region.describe())
            statuses = theirs.read(local, remote, page_spans([0]), words=None).wait(ENOUGH)
        assert settled(statuses) == ["OK"]
        assert (back.view(np.uint64) == 2).all()

    def test_large_batches_and_long_spans(
        self, owner: Transport, reader: Reader, pair: tuple[Endpoint, RemoteRegion], memory: PagedMemory
    ) -> None:
        endpoint, remote = pair
        n_spans = 20_000  # more than any one request of the built-in transports
        memory.bytes[TABLE : TABLE + n_spans] = np.arange(n_spans) % 251
        at = np.arange(n_spans)
        spans = np.stack([at, TABLE + at, np.ones(n_spans, np.int64)], axis=1).astype(np.int64)
        words = np.full((n_spans, 2), NO_WORD)
        words[::3] = (8, 2)  # every third wants the word of page 1
        statuses = endpoint.read(reader.local, remote, spans, words=words).wait(ENOUGH)
        assert (statuses == Status.OK).all()
        assert np.array_equal(reader.bytes[:n_spans], memory.bytes[TABLE : TABLE + n_spans])

        whole = np.array([(0, 0, NBYTES // 2 + 3), (NBYTES // 2 + 3, NBYTES // 2 + 3, 1000)], np.int64)
        statuses = endpoint.read(reader.local, remote, whole, words=None).wait(ENOUGH)
        assert settled(statuses) == ["OK", "OK"]
        n_read = NBYTES // 2 + 1003
        assert np.array_equal(reader.bytes[:n_read], memory.bytes[:n_read])

    def test_an_endpoint_serves_batch_after_batch(
        self, reader: Reader, pair: tuple[Endpoint, RemoteRegion], rng: random.Random
    ) -> None:
        endpoint, remote = pair
        for _ in range(100):
            pages = rng.sample(range(N_PAGES), rng.randint(1, N_PAGES))
            words = page_words(pages, [2] * len(pages))
            transfer = endpoint.read(reader.local, remote, page_spans(pages), words=words)
            statuses = transfer.wait(ENOUGH)
            assert (statuses == Status.OK).all(), settled(statuses)
            assert np.array_equal(transfer.wait(ENOUGH), statuses)
            assert transfer.done()

    def test_done_makes_progress_without_wait(
        self, reader: Reader, pair: tuple[Endpoint, RemoteRegion]
    ) -> None:
        endpoint, remote = pair
        transfer = endpoint.read(reader.local, remote, page_spans([0, 1, 2]), words=None)
        assert eventually(transfer.done)
        assert settled(transfer.wait(0)) == ["OK"] * 3

    def test_advancing_makes_progress_without_wait(
        self, reader: Reader, pair: tuple[Endpoint, RemoteRegion]
    ) -> None:
        endpoint, remote = pair
        transfer = endpoint.read(reader.local, remote, page_spans([0, 1, 2]), words=None)
        assert eventually(lambda: transfer.advance(0.001))
        assert settled(transfer.wait(0)) == ["OK"] * 3

    def test_an_empty_batch_settles(self, reader: Reader, pair: tuple[Endpoint, RemoteRegion]) -> None:
        endpoint, remote = pair
        nothing = np.empty((0, 3), np.int64)
        assert len(endpoint.read(reader.local, remote, nothing, words=None).wait(ENOUGH)) == 0

    # --- words ---

    def test_a_span_is_ok_only_if_its_word_is_as_expected(
        self, memory: PagedMemory, reader: Reader, pair: tuple[Endpoint, RemoteRegion]
    ) -> None:
        endpoint, remote = pair
        memory.rewrite(1, 8)
        memory.words[2] = 3  # odd: being rewritten
        words = page_words([0, 1, 2, 3], [2, 2, 2, 2])
        words[3, 0] = NO_WORD
        statuses = endpoint.read(reader.local, remote, page_spans([0, 1, 2, 3]), words=words).wait(ENOUGH)
        assert settled(statuses) == ["OK", "REJECTED", "REJECTED", "OK"]

        empty = page_spans([0, 1])
        empty[:, 2] = 0
        statuses = endpoint.read(reader.local, remote, empty, words=words[:2]).wait(ENOUGH)
        assert settled(statuses) == ["OK", "REJECTED"]

    # --- ranges and arguments ---

    def test_a_span_out_of_range_is_refused_and_harms_only_itself(
        self, reader: Reader, pair: tuple[Endpoint, RemoteRegion]
    ) -> None:
        endpoint, remote = pair
        top = 2**63 - 1
        bad = [
            (NBYTES - 9, 0, 10),
            (0, NBYTES - 9, 10),
            (-1, 0, 1),
            (0, -1, 1),
            (0, 0, -1),
            (top, 0, 1),
            (0, top, top),
            (0, 1, top),
            (NBYTES + 1, 0, 0),
        ]
        spans = np.array([(0, TABLE, 8), *bad, (8, TABLE, 8)], np.int64)
        statuses = endpoint.read(reader.local, remote, spans, words=None).wait(ENOUGH)
        assert settled(statuses) == ["OK", *["OUT_OF_RANGE"] * len(bad), "OK"]
        assert (reader.bytes[16:] == 0xEE).all()

        good = np.array([(0, TABLE, 8)] * 4, np.int64)
        words = np.array([(NBYTES - 7, 2), (4, 2), (2**64 - 8, 2), (0, 2)], np.uint64)
        statuses = endpoint.read(reader.local, remote, good, words=words).wait(ENOUGH)
        assert settled(statuses) == ["OUT_OF_RANGE"] * 3 + ["OK"]

    def test_wrong_arguments_are_usage_errors(
        self, memory: PagedMemory, reader: Reader, pair: tuple[Endpoint, RemoteRegion]
    ) -> None:
        endpoint, remote = pair
        spans = page_spans([0])
        wrong: list[Spans] = [spans.astype(np.int32), spans[:, :2], spans[0]]
        for array in wrong:
            with pytest.raises(UsageError):
                endpoint.read(reader.local, remote, array, words=None)
        with pytest.raises(UsageError):
            endpoint.read(reader.local, remote, spans, words=page_words([0, 1], [2, 2]))
        with reader.transport.open() as other, pytest.raises(UsageError):
            endpoint.read(reader.local, other.attach(memory.region.describe()), spans, words=None)

    def test_arrays_with_gaps_are_taken(self, reader: Reader, pair: tuple[Endpoint, RemoteRegion]) -> None:
        endpoint, remote = pair
        pages = [0, 1, 2, 3]
        spans, words = page_spans(pages)[::2], page_words(pages, [2, 9, 2, 9])[::2]
        assert settled(endpoint.read(reader.local, remote, spans, words=words).wait(ENOUGH)) == ["OK", "OK"]

    def test_malformed_handshakes_are_refused(
        self, owner: Transport, memory: PagedMemory, reader: Reader, rng: random.Random
    ) -> None:
        with reader.transport.open() as ours, owner.open() as theirs:
            half, region = theirs.describe(), memory.region.describe()
            for blob in (b"", b"x", half[:-1], rng.randbytes(len(half)), region):
                with pytest.raises(TransportError):
                    ours.bind(blob)
                with pytest.raises(TransportError):
                    owner.accept(blob[: len(half) // 4])
            for blob in (b"", region[:-1], rng.randbytes(len(region)), half):
                with pytest.raises(TransportError):
                    ours.attach(blob)

    # --- who may read what ---

    def test_unreadable_memory_has_nothing_to_describe(self, reader: Reader) -> None:
        with pytest.raises(TransportError):
            reader.local.describe()

    def test_a_tampered_handshake_reads_nothing(
        self, owner: Transport, memory: PagedMemory, reader: Reader
    ) -> None:
        endpoint = reader.transport.open()
        half = bytearray(owner.accept(endpoint.describe()))
        half[self.secret_at] ^= 0x55
        endpoint.bind(bytes(half))
        remote = endpoint.attach(memory.region.describe())
        statuses = endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)
        assert settled(statuses) == ["PEER_LOST"]
        assert (reader.bytes == 0xEE).all()

    def test_a_region_that_was_closed_is_read_no_more(
        self, owner: Transport, memory: PagedMemory, reader: Reader, pair: tuple[Endpoint, RemoteRegion]
    ) -> None:
        endpoint, remote = pair
        other = PagedMemory(owner)
        assert settled(endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)) == [
            "OK"
        ]
        memory.region.close()
        memory.region.close()
        statuses = endpoint.read(reader.local, remote, page_spans([1, 2]), words=None).wait(ENOUGH)
        assert not (statuses == Status.OK).any(), settled(statuses)
        with reader.transport.open() as late:
            late.bind(owner.accept(late.describe()))
            stale = late.attach(memory.region.describe())
            statuses = late.read(reader.local, stale, page_spans([1]), words=None).wait(ENOUGH)
            assert settled(statuses) == ["REJECTED"]
            # and the connection is still good for what is open, or says that it is not
            remote = late.attach(other.region.describe())
            statuses = late.read(reader.local, remote, page_spans([1]), words=None).wait(ENOUGH)
            assert settled(statuses) == ["OK" if self.survives_a_closed_region else "PEER_LOST"]

    # --- closing ---

    def test_close_is_idempotent_and_closes_children(
        self, owner: Transport, reader: Reader, pair: tuple[Endpoint, RemoteRegion]
    ) -> None:
        endpoint, remote = pair
        pending = endpoint.read(reader.local, remote, page_spans([0, 1]), words=None)
        reader.transport.close()
        reader.transport.close()
        endpoint.close()
        reader.local.close()
        assert set(settled(pending.wait(0))) <= {"CANCELED", "OK"}
        assert settled(endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)) == [
            "CANCELED"
        ]
        with pytest.raises(P2PKVError):
            reader.transport.open()
        with pytest.raises(P2PKVError):
            reader.transport.register_memory(reader.bytes, reader.bytes.ctypes.data, 8, readable=False)
        owner.close()

    def test_a_second_batch_on_a_busy_endpoint_is_canceled(
        self, reader: Reader, pair: tuple[Endpoint, RemoteRegion]
    ) -> None:
        endpoint, remote = pair
        first = endpoint.read(reader.local, remote, page_spans(list(range(N_PAGES))), words=None)
        second = endpoint.read(reader.local, remote, page_spans([0]), words=None)
        assert settled(second.wait(ENOUGH)) == ["CANCELED"]
        assert (first.wait(ENOUGH) == Status.OK).all()

    def test_closing_an_endpoint_while_another_thread_waits(
        self, owner: Transport, memory: PagedMemory, reader: Reader, rng: random.Random
    ) -> None:
        for _ in range(20):
            endpoint, remote = reader.connect(owner.accept, memory.region.describe())
            transfer = endpoint.read(reader.local, remote, page_spans(list(range(N_PAGES))), words=None)
            outcome: list[NDArray[np.uint8]] = []
            waiting = threading.Thread(target=lambda: outcome.append(transfer.wait(ENOUGH)))  # noqa: B023
            waiting.start()
            time.sleep(rng.random() * 0.001)  # anywhere within the copy
            endpoint.close()
            reader.bytes[:] = 0x11
            assert (reader.bytes == 0x11).all(), "written to after close"
            waiting.join(ENOUGH)
            assert set(settled(outcome[0])) <= {"OK", "CANCELED"}

    def test_closing_local_memory_ends_what_writes_to_it(
        self, reader: Reader, pair: tuple[Endpoint, RemoteRegion]
    ) -> None:
        endpoint, remote = pair
        transfer = endpoint.read(reader.local, remote, page_spans(list(range(N_PAGES))), words=None)
        reader.local.close()
        reader.bytes[:] = 0x11
        statuses = transfer.wait(ENOUGH)
        assert set(settled(statuses)) <= {"OK", "CANCELED"}
        assert (reader.bytes == 0x11).all(), "written to after close"
