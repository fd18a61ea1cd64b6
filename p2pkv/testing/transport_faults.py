"""The rules of transports for what goes wrong: peers that die, torn reads, leaks, strangers."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pkv.testing import listening
from p2pkv.testing.lateness import returns_within
from p2pkv.testing.transport_fixtures import ENOUGH, Reader, TransportFixtures, eventually, settled
from p2pkv.testing.transport_peer import (
    N_PAGES,
    PAGE,
    PagedMemory,
    PeerProcess,
    load_factory,
    page_spans,
    page_words,
    usage,
)
from p2pkv.transports.base import Endpoint, RemoteRegion, Status, Transport
from p2pkv.transports.faulty import Faults, FaultyTransport

_MOST_GROWTHS = 3
"""So often a process may be larger than before, and is looked at once more."""


class FaultRules(TransportFixtures):
    """A peer may die, stop, lie or flood; it costs its readers misses and nobody else anything."""

    # --- peers that die ---

    @property
    def ends_of_the_dead(self) -> set[str]:
        """How reads from a peer that has died may end."""
        return {"PEER_LOST"} if self.notices_deaths else {"PEER_LOST", "TIMED_OUT"}

    def test_a_dead_peer_is_lost_on_its_endpoint_only(
        self, owner: Transport, memory: PagedMemory, reader: Reader, pair: tuple[Endpoint, RemoteRegion]
    ) -> None:
        endpoint, remote = pair
        with load_factory(self.factory)() as mortal:
            mortal_memory = PagedMemory(mortal)
            doomed, doomed_remote = reader.connect(mortal.accept, mortal_memory.region.describe())
            assert settled(
                doomed.read(reader.local, doomed_remote, page_spans([0]), words=None).wait(ENOUGH)
            ) == ["OK"]
        with returns_within(1):
            statuses = doomed.read(reader.local, doomed_remote, page_spans([0]), words=None).wait(ENOUGH)
        assert settled(statuses) == ["PEER_LOST"]
        assert settled(endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)) == [
            "OK"
        ]

    def test_a_process_is_read(self, peer: PeerProcess, reader: Reader) -> None:
        assert peer.domain == reader.transport.domain
        endpoint, remote = reader.connect(peer.accept, peer.region)
        pages = list(range(N_PAGES))
        words = page_words(pages, [2] * N_PAGES)
        statuses = endpoint.read(reader.local, remote, page_spans(pages), words=words).wait(ENOUGH)
        assert (statuses == Status.OK).all()
        assert (reader.bytes[: N_PAGES * PAGE].view(np.uint64) == 2).all()

    def test_a_stopped_peer_costs_the_deadline_and_nothing_writes_afterwards(
        self, peer: PeerProcess, reader: Reader
    ) -> None:
        for has_read_before in (False, True):
            endpoint, remote = reader.connect(peer.accept, peer.region)
            if has_read_before:
                endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)
            peer.stop()
            transfer = endpoint.read(reader.local, remote, page_spans(list(range(N_PAGES))), words=None)
            with returns_within(0.2 + self.slack):
                statuses = transfer.wait(0.2)
                reader.bytes[:] = 0x11
            assert set(settled(statuses)) <= {"OK", "TIMED_OUT"}
            peer.resume()
            # The peer has run, and sent what it had to send, once it has answered another.
            other, other_remote = reader.connect(peer.accept, peer.region)
            with reader.transport.register_memory(
                (scratch := np.zeros(PAGE, np.uint8)), scratch.ctypes.data, PAGE, readable=False
            ) as local:
                assert settled(other.read(local, other_remote, page_spans([0]), words=None).wait(ENOUGH)) == [
                    "OK"
                ]
            assert (reader.bytes == 0x11).all(), "written to after wait() returned"
            assert np.array_equal(transfer.wait(ENOUGH), statuses)
            if (statuses == Status.TIMED_OUT).any():
                statuses = endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)
                assert settled(statuses) == ["PEER_LOST"]

    def test_advancing_at_a_stopped_peer_ends_in_time_and_ends_nothing(
        self, peer: PeerProcess, reader: Reader
    ) -> None:
        endpoint, remote = reader.connect(peer.accept, peer.region)
        peer.stop()
        transfer = endpoint.read(reader.local, remote, page_spans(list(range(N_PAGES))), words=None)
        with returns_within(0.05 + self.slack):
            transfer.advance(0.05)
        peer.resume()
        assert (transfer.wait(ENOUGH) == Status.OK).all()

    def test_a_killed_peer_is_lost_not_hung(self, peer: PeerProcess, reader: Reader) -> None:
        endpoint, remote = reader.connect(peer.accept, peer.region)
        assert settled(endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)) == [
            "OK"
        ]
        peer.stop()
        transfer = endpoint.read(reader.local, remote, page_spans(list(range(N_PAGES))), words=None)
        outcome: list[NDArray[np.uint8]] = []
        patience = ENOUGH if self.notices_deaths else 0.5
        waiting = threading.Thread(target=lambda: outcome.append(transfer.wait(patience)))
        waiting.start()
        peer.kill()
        with returns_within(1):
            waiting.join(ENOUGH)
        assert set(settled(outcome[0])) <= {"OK", *self.ends_of_the_dead}
        statuses = endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(patience)
        assert set(settled(statuses)) <= self.ends_of_the_dead

    # --- torn reads ---

    def test_no_torn_page_is_ok(self, peer: PeerProcess, reader: Reader) -> None:
        hunt = TornReads(peer, reader.transport, self.churn_pause)
        n_ok, n_rejected, n_wrong = hunt.run(at_least_s=1.0)
        print(f"{n_ok} ok, {n_rejected} rejected")
        assert n_wrong == 0
        assert n_ok > 0
        assert n_rejected > 0, "nothing was rewritten while it was read: the test proves nothing"

    @pytest.mark.parametrize(
        "lie", [Faults(words_too_early=True), Faults(unvalidated=True)], ids=["early", "never"]
    )
    def test_the_hunt_for_torn_pages_finds_a_transport_that_lies(
        self, peer: PeerProcess, reader: Reader, lie: Faults
    ) -> None:
        hunt = TornReads(peer, FaultyTransport(reader.transport, lie), self.churn_pause)
        assert hunt.run_until_wrong() > 0

    # --- leaks and strangers ---

    def cycle(self, reader: Reader, n: int) -> None:
        """Let owners come, be read from and die with a read in flight, and readers go without a word."""
        for i in range(n):
            owner = load_factory(self.factory)()
            memory = PagedMemory(owner)
            endpoint, remote = reader.connect(owner.accept, memory.region.describe())
            transfer = endpoint.read(reader.local, remote, page_spans([0, 1, 2, 3, 4]), words=None)
            if i % 2:
                owner.close()
                statuses = transfer.wait(ENOUGH if self.notices_deaths else 0.5)
                assert set(settled(statuses)) <= {"OK", "REJECTED", *self.ends_of_the_dead}, settled(statuses)
                endpoint.close()
            else:
                transfer.wait(ENOUGH)
                endpoint.close()
                owner.close()

    def test_connections_that_come_and_go_leave_nothing(self, reader: Reader) -> None:
        self.check_cycles(reader, self.n_cycles)

    @pytest.mark.slow
    def test_a_thousand_connections_that_come_and_go_leave_nothing(self, reader: Reader) -> None:
        self.check_cycles(reader, 1000)

    def check_cycles(self, reader: Reader, n: int) -> None:
        """Check that nothing of this process grows with the number of peers it has seen.

        What leaks grows every time. An arena more of malloc's, or a pool more of the transport's library, of tens of
        megabytes each, is taken once and no leak.
        """
        self.cycle(reader, 20)  # allocators and caches warm up
        grown = [self._growth(reader, n)]
        while any(grown[-1]) and len(grown) < _MOST_GROWTHS:
            grown.append(self._growth(reader, n))
        assert not any(grown[-1]), grown

    def _growth(self, reader: Reader, n: int) -> tuple[int, int]:
        """Return by how many mappings and bytes this process grows over so many peers, beyond what may vary."""
        gc.collect()
        before = usage()
        self.cycle(reader, n)
        gc.collect()
        assert eventually(lambda: usage()["threads"] <= before["threads"]), (before, usage())
        after = usage()
        assert after["fds"] <= before["fds"]
        n_maps, nbytes = after["maps"] - before["maps"], after["resident"] - before["resident"]
        return (n_maps if n_maps > 12 else 0), (nbytes if nbytes > 24 << 20 else 0)

    @pytest.fixture
    def not_ours(self) -> list[listening.Address]:
        """Where this process listens already, as plug-ins of the test runner do."""
        return listening.addresses()

    def test_strangers_at_the_sockets_are_dropped_and_the_server_goes_on(
        self,
        not_ours: list[listening.Address],  # first, so that it is taken before the owner listens
        owner: Transport,
        memory: PagedMemory,
        reader: Reader,
        rng: random.Random,
    ) -> None:
        before = usage()
        addresses = [address for address in listening.addresses() if address not in not_ours]
        for address in addresses:
            strangers = [listening.connect(address) for _ in range(40)]
            for i, stranger in enumerate(strangers):
                listening.send(stranger, rng.randbytes(rng.choice((1, 39, 40, 41, 4096, 65536))))
                if i % 3 == 0:
                    stranger.close()
            endpoint, remote = reader.connect(owner.accept, memory.region.describe())
            statuses = endpoint.read(reader.local, remote, page_spans([0]), words=None).wait(ENOUGH)
            assert settled(statuses) == ["OK"]
            endpoint.close()
            for stranger in strangers:
                stranger.close()
        assert eventually(
            lambda: usage()["fds"] <= before["fds"] and usage()["threads"] <= before["threads"]
        ), (before, usage())


class TornReads:
    """Reads pages that their owner rewrites all the time, and counts what came of it."""

    def __init__(self, peer: PeerProcess, transport: Transport, pause: float) -> None:
        self._reader = Reader(transport)
        self._endpoint, self._remote = self._reader.connect(peer.accept, peer.region)
        for _ in range(2):  # the first read may have to connect
            began = time.monotonic()
            list(self._read_once())
            took = time.monotonic() - began
        # A machine on which a read takes as long as the rewriting of all pages would show rejected ones only.
        peer.churn(max(pause, took / 8))

    def run(self, *, at_least_s: float) -> tuple[int, int, int]:
        """Return how many pages were OK and right, how many rejected, and how many OK and wrong.

        Goes on, within reason, until there are some of the first two.
        """
        counts = [0, 0, 0]
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < at_least_s or (elapsed < ENOUGH and 0 in counts[:2]):
            self._count(counts)
        self._close()
        return counts[0], counts[1], counts[2]

    def run_until_wrong(self) -> int:
        """Return how many pages were OK and wrong, as soon as there are some; 0 if there are none for long."""
        counts = [0, 0, 0]
        deadline = time.monotonic() + ENOUGH
        while time.monotonic() < deadline and not counts[2]:
            self._count(counts)
        self._close()
        return counts[2]

    def _count(self, counts: list[int]) -> None:
        for page, values, status in self._read_once():
            if status == Status.OK:
                counts[0 if bool((values == page).all()) else 2] += 1
            else:
                assert status == Status.REJECTED, Status(status).name
                counts[1] += 1

    def _close(self) -> None:
        self._endpoint.close()
        self._reader.local.close()

    def _read_once(self) -> Iterator[tuple[int, NDArray[np.uint64], int]]:
        """Look the words up, as a directory would have told them, and read the committed pages."""
        local = self._reader.local
        table = np.array([(0, 0, 8 * N_PAGES)], np.int64)
        assert settled(self._endpoint.read(local, self._remote, table, words=None).wait(ENOUGH)) == ["OK"]
        words = self._reader.bytes[: 8 * N_PAGES].view(np.uint64).copy()
        pages = [page for page in range(N_PAGES) if words[page] % 2 == 0]
        expected = [int(words[page]) for page in pages]
        batch = page_words(pages, expected)
        statuses = self._endpoint.read(local, self._remote, page_spans(pages), words=batch).wait(ENOUGH)
        for i, (value, status) in enumerate(zip(expected, statuses.tolist(), strict=True)):
            yield value, self._reader.bytes[i * PAGE : (i + 1) * PAGE].view(np.uint64), status
