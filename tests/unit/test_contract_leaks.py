"""The contract suite tells what leaks with each peer from what an allocator takes once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from p2pkv.testing.transport_contract import TransportContract
from p2pkv.testing.transport_fixtures import Reader
from p2pkv.transports.local import LocalTransport

N, LEAKED = 20, 2 << 20


class Contract(TransportContract):
    """Its peers leave 2 MiB each behind, from the first to the last of ``leaking`` rounds of them."""

    __test__ = False

    def __init__(self, leaking: range) -> None:
        self._leaking = leaking
        self.n_rounds = 0
        self._left: list[np.ndarray] = []

    def cycle(self, reader: Reader, n: int) -> None:
        if self.n_rounds in self._leaking:
            self._left += [np.ones(LEAKED, np.uint8) for _ in range(n)]
        self.n_rounds += 1


@pytest.fixture
def reader() -> Iterator[Reader]:
    with LocalTransport() as transport:
        yield Reader(transport)


def test_what_leaks_with_each_peer_is_found(reader: Reader) -> None:
    leaking = Contract(range(100))
    with pytest.raises(AssertionError, match=r"\(\d+, 4\d{7}\)"):
        leaking.check_cycles(reader, N)
    assert leaking.n_rounds == 4


def test_what_is_taken_once_is_no_leak(reader: Reader) -> None:
    once = Contract(range(1, 2))
    once.check_cycles(reader, N)
    assert once.n_rounds == 3


def test_what_takes_nothing_is_looked_at_once(reader: Reader) -> None:
    sound = Contract(range(0))
    sound.check_cycles(reader, N)
    assert sound.n_rounds == 2
