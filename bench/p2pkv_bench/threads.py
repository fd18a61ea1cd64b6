"""Four threads of one process beside one thread of it, in turns: whether they get in each other's way.

Beside every case four plain memcpy threads and one, in the same rounds: what four of those get of one says whether a
core was free for more than one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from p2pkv_bench.exists import exists_all, published
from p2pkv_bench.fetch import fetch_all, read_once
from p2pkv_bench.pair import Pages, Pair
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.publish import POOL_NBYTES, ROUND_NBYTES, Case
from p2pkv_bench.references import MEMCPY
from p2pkv_bench.rounds import take_turns, timed_together
from p2pkv_bench.rows import KIB, Row, Target, make_row

Threaded = Callable[[int], float]
"""Does a round with so many threads and returns its figure; as much is done with one as with many."""

THREADS = 4
ONE = "one thread"
LEAST_OF_ONE = 1.5
_PAGE_NBYTES = 64 * KIB
_BATCH = 32
_EXISTS = {128: 800, 1024: 160}
"""Calls of a round, by the number of keys."""


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure exists, fetch and publish."""
    plan = replace(plan, round_nbytes=ROUND_NBYTES)
    with Pair(meeting, "shm", plan.working_set, reader_pool=POOL_NBYTES) as pair:
        publishes = {
            n: Case(pair, plan, _PAGE_NBYTES, _BATCH, n, timing=timed_together) for n in (THREADS, 1)
        }

        def copy(n_threads: int) -> float:
            return publishes[n_threads].copy(is_chosen=False)

        keys = published(pair, max(_EXISTS))
        for n_keys, n_calls in _EXISTS.items():
            plan.tell(f"threads, exists of {n_keys} keys")
            figures = _measure(partial(_exists, pair, keys[:n_keys], n_calls), copy, plan)
            yield from compare(figures, case="exists", unit="M/s", batch=n_keys)
        plan.tell("threads, fetch: reads everything once")
        pages = Pages(pair, _PAGE_NBYTES)
        read_once(pair.node, pages)
        plan.tell("threads, fetch")
        figures = _measure(partial(_fetch, pair, pages, plan), copy, plan)
        moved = partial(compare, unit="GB/s", batch=_BATCH, page_nbytes=_PAGE_NBYTES)
        yield from moved(figures, case="fetch over shm, cached")
        plan.tell("threads, publish")
        publishes[1].fill()
        figures = _measure(lambda n_threads: publishes[n_threads].publish(), copy, plan)
        yield from moved(figures, case="publish into a full pool")


def _measure(ours: Threaded, copy: Threaded, plan: Plan) -> dict[tuple[str, int], list[float]]:
    contestants = {
        (name, n): partial(one_round, n)
        for name, one_round in (("p2pkv", ours), (MEMCPY, copy))
        for n in (THREADS, 1)
    }
    by_text = {f"{name} {n}": one_round for (name, n), one_round in contestants.items()}
    return dict(zip(contestants, take_turns(by_text, plan.rounds).values(), strict=True))


def compare(
    figures: dict[tuple[str, int], list[float]], *, case: str, unit: str, batch: int, page_nbytes: int = 0
) -> Iterator[Row]:
    """Make the two rows of a case: p2pkv's many threads beside one, and memcpy's."""
    yield make_row(
        {"p2pkv": figures["p2pkv", THREADS], ONE: figures["p2pkv", 1]},
        suite="threads",
        case=case,
        unit=unit,
        page_nbytes=page_nbytes,
        batch=batch,
        threads=THREADS,
        target=Target(LEAST_OF_ONE, ONE),
    )
    yield make_row(
        {MEMCPY: figures[MEMCPY, THREADS], ONE: figures[MEMCPY, 1]},
        suite="threads",
        case=f"  memcpy, in the rounds of {case}",
        unit="GB/s",
        page_nbytes=_PAGE_NBYTES,
        batch=_BATCH,
        threads=THREADS,
    )


def _exists(pair: Pair, keys: list[str], n_calls: int, n_threads: int) -> float:
    calls = [partial(exists_all, pair, keys)] * (n_calls // n_threads)
    return len(keys) * n_calls / timed_together([calls] * n_threads) / 1e6


def _fetch(pair: Pair, pages: Pages, plan: Plan, n_threads: int) -> float:
    n_calls = plan.n_calls(pages.nbytes, _BATCH, n_threads)
    moves = [pages.next_moves(n_calls, _BATCH) for _ in range(n_threads)]
    for part in moves:
        for move in part:
            exists_all(pair, move.keys)  # from here on its look-up is cached
    seconds = timed_together([[partial(fetch_all, pair.node, move) for move in part] for part in moves])
    for part in moves:
        pages.verify(part)
    return n_threads * n_calls * _BATCH * pages.nbytes / seconds / 1e9
