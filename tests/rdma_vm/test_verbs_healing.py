"""Two devices at each end of two cables: one is cut while bytes are on their way, and nothing is missed."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pkv.transports.base import MemoryRegion, Status
from p2pkv.transports.verbs import VerbsTransport
from rdma_link import SecondCable

_missing = VerbsTransport.unavailable()
pytestmark = [
    pytest.mark.rdma_slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(_missing is not None, reason=f"verbs: {_missing}"),
]

N_PAGES, NBYTES = 16, 32 << 10
DEADLINE = 10.0
N_CUTS = 8
WINDOW_S = 0.3
LATE_S = 1.5
"""A device that still wanted the answer asks again after 0.54 seconds, and would have it by then."""


@pytest.fixture(scope="module")
def cable() -> SecondCable:
    return SecondCable()


class Pair:
    """An owner with pages and a reader, with two devices each; what is lost is connected anew, as a fetch does."""

    def __init__(self) -> None:
        self.owner, self.reader = VerbsTransport(["rxe0", "rxe2"]), VerbsTransport(["rxe1", "rxe3"])
        self.pages = np.random.default_rng(1).integers(0, 256, N_PAGES * NBYTES, np.uint8)
        self.memory = np.zeros_like(self.pages)
        self.region = self._register(self.owner, self.pages, readable=True)
        self.local = self._register(self.reader, self.memory, readable=False)
        self.connect()

    @staticmethod
    def _register(transport: VerbsTransport, array: NDArray[np.uint8], *, readable: bool) -> MemoryRegion:
        return transport.register_memory(array, array.ctypes.data, array.nbytes, readable=readable)

    def connect(self) -> None:
        self.endpoint = self.reader.open()
        self.endpoint.bind(self.owner.accept(self.endpoint.describe()))
        self.remote = self.endpoint.attach(self.region.describe())

    def read(self) -> float:
        """Read every page, look at each byte, and return how long it took."""
        self.memory[:] = 0
        offsets = np.arange(N_PAGES) * NBYTES
        spans = np.stack([offsets, offsets, np.full(N_PAGES, NBYTES)], axis=1).astype(np.int64)
        began = time.monotonic()
        statuses = self.endpoint.read(self.local, self.remote, spans, words=None).wait(DEADLINE)
        if (statuses == Status.PEER_LOST).any():
            self.endpoint.close()
            self.connect()
            statuses = self.endpoint.read(self.local, self.remote, spans, words=None).wait(DEADLINE)
        took = time.monotonic() - began
        assert (statuses == Status.OK).all(), f"{statuses} after {took:.3f} s: {self.reader.rail_totals()}"
        assert np.array_equal(self.memory, self.pages)
        return took

    def read_until_both_carry(self) -> None:
        until = time.monotonic() + 60.0
        while time.monotonic() < until:
            before = [rail.nbytes for rail in self.reader.rail_totals()]
            self.read()
            after = [rail.nbytes for rail in self.reader.rail_totals()]
            if len(before) == 2 and after[0] > before[0] and after[1] > before[1]:
                return
        pytest.fail(f"not both rails carry: {self.reader.rail_totals()}")

    def longest_during(self, do: Callable[[], object]) -> float:
        """Read over and over until ``do`` is done, and for a while more; return what the longest took."""
        doing = threading.Thread(target=do)
        doing.start()
        took, until = [], 0.0
        while doing.is_alive() or time.monotonic() < until:
            took.append(self.read())
            until = until or (0.0 if doing.is_alive() else time.monotonic() + WINDOW_S)
        doing.join()
        return max(took)

    def close(self) -> None:
        self.reader.close()
        self.owner.close()


@pytest.mark.parametrize("how", ["unplug", "lose_answers"])
def test_a_device_that_is_cut_costs_no_page(cable: SecondCable, how: str) -> None:
    moments = random.Random(how)
    usual, cut, n_failures = [], [], 0
    for _ in range(N_CUTS):
        pair = Pair()
        try:
            pair.read_until_both_carry()
            usual.append(pair.longest_during(lambda: time.sleep(WINDOW_S)))

            def cut_it() -> None:
                time.sleep(moments.random() * 0.1)
                getattr(cable, how)()

            cut.append(pair.longest_during(cut_it))
            n_failures += sum(pair.reader.rail_totals()[1].failures.values())
            pair.memory[:] = 0x11  # the caller's again
            cable.plug_in()
            time.sleep(LATE_S)
            assert (pair.memory == 0x11).all(), "what came late was written"
        finally:
            cable.plug_in()
            pair.close()
    usual.sort()
    cut.sort()
    print(
        f"{how}: the longest read of a window takes {usual[N_CUTS // 2] * 1e3:.0f} ms, with a cut "
        f"{cut[N_CUTS // 2] * 1e3:.0f} ms; the longest of {N_CUTS} {usual[-1] * 1e3:.0f} and {cut[-1] * 1e3:.0f} ms"
    )
    assert n_failures >= N_CUTS // 2
    # a device by itself takes 3.8 seconds to find out
    assert cut[N_CUTS // 2] < 1.5


def test_a_device_that_is_taken_away_costs_no_page(cable: SecondCable) -> None:
    pair = Pair()
    pair.read_until_both_carry()
    # the kernel may wait for whoever has the device open
    taking = subprocess.Popen(["rdma", "link", "delete", "rxe3"])
    longest = pair.longest_during(lambda: time.sleep(1.0))
    print(f"a device taken away: the longest read takes {longest * 1e3:.0f} ms")
    pair.close()
    del pair
    assert taking.wait(60.0) == 0
