"""What the rules of the transport contract are checked with: an owner, a reader, a peer process."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pkv.testing.lateness import Lateness
from p2pkv.testing.transport_peer import NBYTES, PagedMemory, PeerProcess, load_factory, usage
from p2pkv.transports.base import Endpoint, MemoryRegion, RemoteRegion, Status, Transport

ENOUGH = 60.0
"""Seconds that nothing here should ever take, also in an emulated machine that has other work."""


def settled(statuses: NDArray[np.uint8]) -> list[str]:
    """Return the names of statuses, which read better in a failure than numbers."""
    return [Status(status).name for status in statuses.tolist()]


def eventually(predicate: Callable[[], bool], timeout: float = 60.0) -> bool:
    """Return whether ``predicate`` comes true in time: for what another process or thread does by itself."""
    deadline = time.monotonic() + timeout
    while not predicate():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Reader:
    """A transport, an endpoint bound to an owner, and local memory with a canary around what is read."""

    def __init__(self, transport: Transport, nbytes: int = NBYTES) -> None:
        self.transport = transport
        self.bytes = np.full(nbytes, 0xEE, np.uint8)
        self.local: MemoryRegion = transport.register_memory(
            self.bytes, self.bytes.ctypes.data, nbytes, readable=False
        )

    def connect(self, accept: Callable[[bytes], bytes], region: bytes) -> tuple[Endpoint, RemoteRegion]:
        endpoint = self.transport.open()
        endpoint.bind(accept(endpoint.describe()))
        return endpoint, endpoint.attach(region)


@pytest.mark.usefixtures("nothing_leaks")
class TransportFixtures:
    """Fixtures for the transport that ``factory`` names."""

    factory: ClassVar[str]
    crosses_processes: ClassVar[bool] = True
    secret_at: ClassVar[int] = -1
    """Where in the owner's half of a handshake a byte stands without which the owner lets nobody in."""

    survives_a_closed_region: ClassVar[bool] = True
    """Whether a connection over which a closed region was asked for is good for other regions. A connection of an
    RDMA device is not: the peer's device ends it."""

    churn_pause: ClassVar[float] = 0.0002
    """Seconds between two pages that the owner rewrites, in the hunt for torn reads. A batch should meet pages in every
    state: untouched, being rewritten, and done since; so the slower the machine, the longer the pause."""

    notices_deaths: ClassVar[bool] = True
    """Whether a read ends, as PEER_LOST, within a second of its peer's death. Where no connection breaks, and the
    device has taken the request, only keepalives would tell: then the deadline ends it, as TIMED_OUT."""

    slack: ClassVar[float] = 0.1
    """Seconds by which a call may miss its deadline, beside what the machine is late by. In an emulated machine a
    single step of a library may take longer than that."""

    n_cycles: ClassVar[int] = 200
    """Connections that come and go one after another, of which nothing may be left."""

    # --- fixtures ---

    @pytest.fixture
    def rng(self) -> random.Random:
        seed = int(os.environ.get("P2PKV_TEST_SEED", random.SystemRandom().randrange(2**32)))
        print(f"P2PKV_TEST_SEED={seed}")
        return random.Random(seed)

    @pytest.fixture
    def nothing_leaks(self) -> Iterator[None]:
        """No test leaves a thread or a descriptor behind."""
        Lateness()  # the first one starts a process, and keeps a descriptor of it; so does the peers' nursery
        if self.crosses_processes:
            PeerProcess.nursery()
        before = usage()
        yield
        gc.collect()
        assert eventually(
            lambda: usage()["threads"] <= before["threads"] and usage()["fds"] <= before["fds"]
        ), (before, usage())

    @pytest.fixture
    def owner(self) -> Iterator[Transport]:
        with load_factory(self.factory)() as transport:
            yield transport

    @pytest.fixture
    def memory(self, owner: Transport) -> Iterator[PagedMemory]:
        memory = PagedMemory(owner)
        yield memory
        memory.close()

    @pytest.fixture
    def reader(self) -> Iterator[Reader]:
        with load_factory(self.factory)() as transport:
            yield Reader(transport)

    @pytest.fixture
    def pair(self, owner: Transport, memory: PagedMemory, reader: Reader) -> tuple[Endpoint, RemoteRegion]:
        return reader.connect(owner.accept, memory.region.describe())

    @pytest.fixture
    def peer(self) -> Iterator[PeerProcess]:
        if not self.crosses_processes:
            pytest.skip("stays within a process")
        with PeerProcess(self.factory) as peer:
            yield peer
