"""The systems that run here, each with the process that has its pages and readers in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module

from p2pkv_bench.pair import Move, Pair
from p2pkv_bench.peer import Peer
from p2pkv_bench.peers import base
from p2pkv_bench.peers.systems import System
from p2pkv_bench.rounds import Call
from p2pkv_bench.working_set import Destination

Tell = Callable[[str], None]


class Entrant:
    """One system that works here: it has one reader at least, and one for each thread if it can."""

    def __init__(self, system: System, owner: Peer, readers: Sequence[base.Reader]) -> None:
        self.system = system
        self._owner = owner
        self._readers = readers

    @property
    def most_threads(self) -> int:
        """How many threads can read at once."""
        return len(self._readers)

    def publish(self, page_nbytes: int, n_pages: int) -> None:
        """Make all pages of one size readable, and let every reader know."""
        with self._owner_awake():
            published = self._owner.call("publish", page_nbytes=page_nbytes, n_pages=n_pages)
            for reader in self._readers:
                reader.meet(page_nbytes, published)

    @contextmanager
    def turn(self, moves: Sequence[Sequence[Move]]) -> Iterator[list[list[Call]]]:
        """Yield, for as long as its turn is, the calls that bring the moves: each thread's by a reader of its own."""
        readers = self._readers[: len(moves)]
        with self._owner_awake(), ExitStack() as turns:
            for reader, part in zip(readers, moves, strict=True):
                turns.enter_context(reader.turn())
                reader.prepare(part)
            yield [
                [partial(reader.fetch, move) for move in part]
                for reader, part in zip(readers, moves, strict=True)
            ]

    @contextmanager
    def _owner_awake(self) -> Iterator[None]:
        if not self.system.spins:
            yield
            return
        self._owner.resume()
        try:
            yield
        finally:
            self._owner.stop()


def entrants(
    systems: Sequence[System], pair: Pair, n_readers: int, undo: ExitStack, say: Tell
) -> list[Entrant]:
    """Start what can be started here; ``say`` is told in a sentence why the others can't."""
    started = []
    for system in systems:
        try:
            started.append(_enter(system, pair, n_readers, undo, say))
        except base.FOREIGN as error:
            say(f"{system.name} is left out: {error}.")
    return started


def _enter(system: System, pair: Pair, n_readers: int, undo: ExitStack, say: Tell) -> Entrant:
    reader_class = import_module(f"p2pkv_bench.peers.{system.module}").Reader
    owner = undo.enter_context(Peer("p2pkv_bench.peers.worker"))
    owner.call(
        "own", module=system.module, options=dict(system.options), working_set=pair.source.array.nbytes
    )
    readers = _readers(reader_class, system, pair.destination, n_readers, say)
    if system.spins:
        owner.stop()
        undo.callback(owner.resume)  # what stands still does not end by itself
    return Entrant(system, owner, readers)


def _readers(
    reader_class: Callable[[Destination, base.Options, int], base.Reader],
    system: System,
    destination: Destination,
    n_readers: int,
    say: Tell,
) -> list[base.Reader]:
    readers = [reader_class(destination, system.options, 0)]
    try:
        for number in range(1, n_readers):
            readers.append(reader_class(destination, system.options, number))
    except base.FOREIGN as error:
        say(f"{system.name} reads with {len(readers)} threads at most: {error}.")
    return readers


class Guarded:
    """A contestant that may fail: from then on it has no figures, and ``error`` says why."""

    def __init__(self, one_round: Callable[[], float]) -> None:
        self._one_round = one_round
        self.error = ""

    def __call__(self) -> float:
        if self.error:
            return 0.0
        try:
            return self._one_round()
        except base.FOREIGN as error:
            self.error = str(error)
            return 0.0
