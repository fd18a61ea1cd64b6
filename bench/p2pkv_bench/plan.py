"""What a run measures: which suites, pages, batches and threads, and how often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from p2pkv_bench.rows import KIB, MIB

SUITES = (
    *("fetch", "publish", "exists", "gil", "validation", "overhead", "load", "memory"),
    *(
        "threads",
        "copies",
        "transports",
        "disk",
        "compression",
        "transfers",
        "room",
        "start",
        "scrape",
        "indexer",
        "rails",
        "attach",
        "ring",
        "hot",
        "spread",
        "processes",
        "lives",
        "fabric",
        "news",
    ),
)
LONG = frozenset(SUITES[SUITES.index("threads") :]) | {"load"}
"""Left out of a quick run."""
NAMED = frozenset({"processes", "lives", "fabric", "news"})
"""Run only where they are asked for by name: 64 processes, a million pages and 1,000 members want a machine."""
TRANSPORTS = ("shm", "tcp", "ucx", "verbs")
PAGES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
BATCHES = (1, 32, 128)
THREADS = (1, 4)
PUBLISHED = 10_000_000
_MOST_AT_ONCE = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run."""

    suites: tuple[str, ...] = tuple(suite for suite in SUITES if suite not in NAMED)
    transports: tuple[str, ...] = ("shm", "tcp")
    chosen_transports: tuple[str, ...] = ()
    """Those asked for by name; the suite ``transports`` takes all that can run if there are none."""
    pages: tuple[int, ...] = PAGES
    batches: tuple[int, ...] = BATCHES
    threads: tuple[int, ...] = THREADS
    processes: tuple[int, ...] = (64,)
    """How many node processes the suite of that name starts, one size after another."""
    kept: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """How many pages a keeper has of a node that is killed, one number after another."""
    members: tuple[int, ...] = (1000,)
    """How many members the suites ``fabric`` and ``news`` have, one size after another."""
    published: int = PUBLISHED
    """Pages that the members of ``fabric`` have together."""
    rounds: int = 5
    round_nbytes: int = 64 * MIB
    """What one contestant moves in one round, at least a call a thread."""
    round_calls: int = 300
    """The most calls of one round, for small ones."""
    gil_seconds: float = 10.0
    load_seconds: float = 3.0
    working_set: int = 512 * MIB
    tell: Callable[[str], None] = print
    """Told what is measured now."""

    def n_calls(self, page_nbytes: int, batch: int, threads: int) -> int:
        """Return how many calls each thread makes in a round."""
        wanted = min(self.round_calls, -(-self.round_nbytes // (page_nbytes * batch)))
        return max(1, wanted // threads)

    def fits(self, page_nbytes: int, batch: int, threads: int) -> bool:
        """Whether so many pages can be on their way at once without using up the memory they rotate over."""
        return page_nbytes * batch * threads <= min(_MOST_AT_ONCE, self.working_set // 2)


def quick(plan: Plan) -> Plan:
    """Return a run of less than a minute."""
    return replace(
        plan,
        suites=tuple(suite for suite in SUITES if suite not in LONG),
        pages=(64 * KIB, MIB),
        batches=(32,),
        threads=(1,),
        round_nbytes=32 * MIB,
        round_calls=150,
        gil_seconds=2.0,
        load_seconds=1.0,
        working_set=min(plan.working_set, 256 * MIB),
    )
