"""The same pages brought by p2pkv over shm and tcp, by every other system that works here, and by memcpy, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from p2pkv_bench import references, report
from p2pkv_bench.fetch import fetch_all
from p2pkv_bench.pair import Move, Pages, Pair
from p2pkv_bench.peer import Meeting
from p2pkv_bench.peers import base
from p2pkv_bench.peers.entrants import Entrant, Guarded, Tell, entrants
from p2pkv_bench.peers.systems import NIXL_CMA, OURS, System
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import Contestant, take_turns, timed
from p2pkv_bench.rows import KIB, MIB, Row, Target, make_row

CASE = "fetch"
_TRANSPORTS = ("shm", "tcp")
_LEAST_OF_NIXL = 1.2
_JUDGED = {(64 * KIB, 32, 1), (MIB, 32, 1)}


def rows(plan: Plan, systems: Sequence[System], say: Tell, entered: list[Entrant]) -> Iterator[Row]:
    """Measure the cases of the plan; ``say`` is told what is left out and why.

    Those that take part are added to ``entered``, for the caller to keep until the process ends: libraries whose
    readers go away before may end it too early.
    """
    with ExitStack() as undo:
        pairs = {
            name: undo.enter_context(Pair(undo.enter_context(Meeting()), name, plan.working_set))
            for name in _TRANSPORTS
        }
        plan.tell("the other systems start")
        entered += entrants(systems, pairs["shm"], max(plan.threads), undo, say)
        for page_nbytes in plan.pages:
            yield from _Size(pairs, entered, plan, page_nbytes, say).rows()


class _Size:
    """All cases with pages of one size."""

    def __init__(
        self,
        pairs: Mapping[str, Pair],
        entered: Sequence[Entrant],
        plan: Plan,
        page_nbytes: int,
        say: Tell,
    ) -> None:
        self._pairs = pairs
        self._plan = plan
        self._page_nbytes = page_nbytes
        self._say = say
        plan.tell(f"pages of {report.page_size(page_nbytes)} are published")
        self._pages = {name: Pages(pair, page_nbytes) for name, pair in pairs.items()}
        self._entered = [entrant for entrant in entered if self._publishes(entrant)]

    def _publishes(self, entrant: Entrant) -> bool:
        try:
            entrant.publish(self._page_nbytes, self._pages["shm"].n_pages)
        except base.FOREIGN as error:
            size = report.page_size(self._page_nbytes)
            self._say(f"{entrant.system.name} is left out with pages of {size}: {error}.")
            return False
        return True

    def rows(self) -> Iterator[Row]:
        """Make two rows a case, one for each of p2pkv's transports, with all others as references."""
        for threads in self._plan.threads:
            for batch in self._plan.batches:
                if self._plan.fits(self._page_nbytes, batch, threads):
                    case = f"{report.page_size(self._page_nbytes)}, {batch} a call, threads: {threads}"
                    self._plan.tell(case)
                    yield from self._case_rows(batch, threads, self._figures(batch, threads, case))

    def _figures(self, batch: int, threads: int, case: str) -> dict[str, list[float]]:
        contestants: dict[str, Contestant] = {}
        for name, pair in self._pairs.items():
            contestants[f"{OURS} {name}"] = partial(self._our_round, pair, batch, threads)
        guarded: dict[str, Guarded] = {}
        for entrant in self._entered:
            if entrant.most_threads >= threads:
                guarded[entrant.system.name] = Guarded(partial(self._their_round, entrant, batch, threads))
        memcpy = partial(self._copy_round, batch, threads)
        figures = take_turns({**contestants, **guarded, references.MEMCPY: memcpy}, self._plan.rounds)
        for name, contestant in guarded.items():
            if contestant.error:
                self._say(f"{name} is left out of {case}: {contestant.error}.")
                del figures[name]
        return figures

    def _case_rows(self, batch: int, threads: int, figures: dict[str, list[float]]) -> Iterator[Row]:
        others = {name: values for name, values in figures.items() if not name.startswith(OURS)}
        for name in self._pairs:
            yield make_row(
                {OURS: figures[f"{OURS} {name}"]} | others,
                suite="peers",
                case=CASE,
                unit="GB/s",
                transport=name,
                page_nbytes=self._page_nbytes,
                batch=batch,
                threads=threads,
                target=target(name, self._page_nbytes, batch, threads) if NIXL_CMA in others else None,
            )

    def _our_round(self, pair: Pair, batch: int, threads: int) -> float:
        pages = self._pages[pair.transport]
        moves = self._next_moves(pages, batch, threads)
        for part in moves:
            for move in part:
                pair.node.exists(move.keys)  # from here on its look-up is cached
        seconds = timed([[partial(fetch_all, pair.node, move) for move in part] for part in moves])
        return self._verified(pages, moves, seconds)

    def _their_round(self, entrant: Entrant, batch: int, threads: int) -> float:
        pages = self._pages["shm"]
        moves = self._next_moves(pages, batch, threads)
        with entrant.turn(moves) as calls:
            seconds = timed(calls)
        return self._verified(pages, moves, seconds)

    def _copy_round(self, batch: int, threads: int) -> float:
        pages = self._pages["shm"]
        moves = self._next_moves(pages, batch, threads)
        seconds = timed(references.copies(self._pairs["shm"], moves, is_chosen=False))
        return self._verified(pages, moves, seconds)

    def _next_moves(self, pages: Pages, batch: int, threads: int) -> list[list[Move]]:
        n_calls = self._plan.n_calls(pages.nbytes, batch, threads)
        return [pages.next_moves(n_calls, batch) for _ in range(threads)]

    @staticmethod
    def _verified(pages: Pages, moves: Sequence[Sequence[Move]], seconds: float) -> float:
        """Return GB/s if every byte is right, and raise BenchError otherwise."""
        for part in moves:
            pages.verify(part)
        return sum(move.batch for part in moves for move in part) * pages.nbytes / seconds / 1e9


def target(transport: str, page_nbytes: int, batch: int, threads: int) -> Target | None:
    """Return what is asked of p2pkv beside one copy by the kernel; only shm is that."""
    is_judged = transport == "shm" and (page_nbytes, batch, threads) in _JUDGED
    return Target(_LEAST_OF_NIXL, NIXL_CMA) if is_judged else None
