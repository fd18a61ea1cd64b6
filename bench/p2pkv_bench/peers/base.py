"""What another system must do to be compared, a module each.

All have an ``Owner``, which makes pages readable and runs in the other process, and a ``Reader``, which brings batches
of them over. Where a system only moves memory, it is spared what p2pkv does besides: finding the page, and proving that
it is the one published. A system that keeps pages in memory of its own has a ``Pool``; one that registers its user's
has a ``Registered``.

What a system's library raises, its module raises as :class:`~p2pkv_bench.errors.BenchError`, or lets pass if it is one
of ``FOREIGN``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pkv.transports.base import Resource
from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Move
from p2pkv_bench.working_set import Destination, Source

Options = Mapping[str, Any]
"""Of :class:`~p2pkv_bench.peers.systems.System`."""

FOREIGN = (BenchError, ImportError, OSError, RuntimeError, ValueError, TypeError)


class Owner(Resource):
    """The side that has the pages."""

    def __init__(self, source: Source, options: Options) -> None:
        self.source = source
        self.options = options

    @abstractmethod
    def publish(self, page_nbytes: int, n_pages: int) -> Any:
        """Make pages readable; returns, as JSON can carry it, what the readers need to know."""


class Reader(Resource):
    """The side that wants them, for one thread; ``number`` tells it from those of other threads."""

    def __init__(self, destination: Destination, options: Options, number: int) -> None:
        self.destination = destination
        self.options = options
        self.number = number

    @abstractmethod
    def meet(self, page_nbytes: int, published: Any) -> None:
        """Take what :meth:`Owner.publish` returned."""

    def turn(self) -> AbstractContextManager[object]:
        """Return what holds while it is this system's turn: threads that spin would take a core from the others."""
        return nullcontext()

    @abstractmethod
    def prepare(self, moves: Sequence[Move]) -> None:
        """Do what may be done before the clock starts, such as a look-up whose result is cached."""

    @abstractmethod
    def fetch(self, move: Move) -> None:
        """Bring one batch over; returns when it is there. Raises BenchError if any page is not."""


class Registered(Resource):
    """A system by itself. The constructor does what is done before it: imports, other processes."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def start(self, nbytes: int) -> None:
        """Start it, with so many bytes of pool or registered memory; returns when it can be used."""


class Pool(Registered):
    """A system by itself that keeps pages."""

    @abstractmethod
    def use(self, memory: NDArray[np.uint8]) -> None:
        """Register the rows, of one page each, that pages are put from and brought to."""

    @abstractmethod
    def put(self, keys: Sequence[str]) -> None:
        """Store the first rows under these keys, as many as it takes."""

    @abstractmethod
    def get(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Bring what is there to the first rows; say which are."""
