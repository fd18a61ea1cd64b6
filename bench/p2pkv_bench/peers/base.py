"""What another system must do to be compared: make the owner's pages readable, and bring batches of them over.

Each system is one module with two classes. The owner's runs in the other process. Where a system only moves memory,
it is spared what p2pkv does besides: finding the page, and proving that it is the one published.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from p2pkv.transports.base import Resource
from p2pkv_bench.pair import Move
from p2pkv_bench.working_set import Destination, Source


class Owner(Resource):
    """The side that has the pages."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @abstractmethod
    def publish(self, page_nbytes: int, n_pages: int) -> Any:
        """Make pages readable; returns, as JSON can carry it, what the reader needs to know."""


class Reader(Resource):
    """The side that wants them."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination

    @abstractmethod
    def meet(self, page_nbytes: int, published: Any) -> None:
        """Take what :meth:`Owner.publish` returned."""

    @abstractmethod
    def prepare(self, moves: Sequence[Move]) -> None:
        """Do what may be done before the clock starts, such as a look-up whose result is cached."""

    @abstractmethod
    def fetch(self, move: Move) -> None:
        """Bring one batch over; returns when it is there. Raises BenchError if any page is not."""
