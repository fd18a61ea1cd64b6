"""The contract suite tells what leaks with each peer from what an allocator takes once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from p2pkv.testing.transport_contract import TransportContract
from p2pkv.testing.transport_fixtures import Reader
from p2pkv.transports.local import LocalTransport

N, LEAKED = 20, 2 << 20


class Contract(TransportContract):
    """Its process is 2 MiB larger for each peer, from the first to the last of ``leaking`` rounds of them."""

    __test__ = False

    def __init__(self, leaking: range) -> None:
        self._leaking = leaking
        self.n_rounds = 0
        self._resident = 100 << 20

    def cycle(self, _reader: Reader, n: int) -> None:
        self._resident += LEAKED * n if self.n_rounds in self._leaking else 0
        self.n_rounds += 1

    def usage(self) -> dict[str, int]:
        return {"fds": 10, "threads": 5, "maps": 500, "resident": self._resident}


@pytest.fixture
def reader() -> Iterator[Reader]:
    with LocalTransport() as transport:
        yield Reader(transport)


@pytest.fixture
def leaking(monkeypatch: pytest.MonkeyPatch) -> Callable[[range], Contract]:
    def make(rounds: range) -> Contract:
        contract = Contract(rounds)
        monkeypatch.setattr("p2pkv.testing.transport_faults.usage", contract.usage)
        return contract

    return make


def test_what_leaks_with_each_peer_is_found(leaking: Callable[[range], Contract], reader: Reader) -> None:
    contract = leaking(range(100))
    with pytest.raises(AssertionError, match=str(N * LEAKED)):
        contract.check_cycles(reader, N)
    assert contract.n_rounds == 4


def test_what_is_taken_once_is_no_leak(leaking: Callable[[range], Contract], reader: Reader) -> None:
    contract = leaking(range(1, 2))
    contract.check_cycles(reader, N)
    assert contract.n_rounds == 3


def test_what_takes_nothing_is_looked_at_once(leaking: Callable[[range], Contract], reader: Reader) -> None:
    contract = leaking(range(0))
    contract.check_cycles(reader, N)
    assert contract.n_rounds == 2
