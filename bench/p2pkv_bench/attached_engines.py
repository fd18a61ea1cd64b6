"""Measure what attaching takes, and eight engines that publish at once, each in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

from p2pkv_bench.peer import Meeting, Peer
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import take_turns
from p2pkv_bench.rows import KIB, MIB, Row, Target, make_row

HOST = "host"
ENGINES = 8
_ONE, _SHARE = "one engine", "the least of them, of an eighth"
_POOLS = (64 * MIB, 2048 * MIB)
_MOST_ATTACH_MS = 100.0
_PAGE_NBYTES, _BATCH = 64 * KIB, 32
_WORKING_SET = 64 * MIB
_SECONDS = 1.0


def path_of(meeting: Meeting) -> str:
    """Return where the host's node of a meeting listens for engines."""
    return f"unix:{meeting.folder}/host"


def rows(plan: Plan) -> Iterator[Row]:
    """Measure both."""
    for pool_nbytes in _POOLS:
        yield _attach_time(plan, pool_nbytes)
    yield from _at_once(plan)


def _attach_time(plan: Plan, pool_nbytes: int) -> Row:
    """Start an engine, as often as there are rounds, until it can publish and fetch."""
    plan.tell(f"attach: an engine is started, pool of {pool_nbytes // MIB} MiB")
    milliseconds = []
    with Meeting() as meeting, Peer() as host:
        _start_host(meeting, host, pool_nbytes)
        for _ in range(plan.rounds + 1):
            began = time.perf_counter()
            engine = meeting.start("engine", attach=path_of(meeting), transports=["shm"])
            milliseconds.append((time.perf_counter() - began) * 1e3)
            engine.close()
    return make_row(
        {"attached": milliseconds[1:]},
        suite="attach",
        case=f"an engine is started, the pool has {pool_nbytes // MIB} MiB",
        unit="ms",
        target=Target(_MOST_ATTACH_MS, at_most=True),
    )


def _at_once(plan: Plan) -> Iterator[Row]:
    """Have eight engines publish into a full pool, and one; what they do together, and the least that one gets."""
    plan.tell(f"attach: {ENGINES} engines at once")
    with Meeting() as meeting, ExitStack() as undo:
        host = undo.enter_context(Peer())
        _start_host(meeting, host, 256 * MIB)
        engines = []
        for number in range(ENGINES):
            engines.append(undo.enter_context(Peer()))
            config = meeting.settings(f"engine-{number}", attach=path_of(meeting), transports=["shm"])
            engines[-1].call("start", config=config, working_set=_WORKING_SET)
        shares: list[float] = []
        figures = take_turns(
            {
                "attached": lambda: _publish(engines, shares),
                _ONE: lambda: _publish(engines[:1], []),
            },
            plan.rounds,
        )
    yield make_row(
        figures,
        suite="attach",
        case=f"{ENGINES} engines publish into a full pool",
        unit="GB/s",
        target=Target(0.9, _ONE),
        page_nbytes=_PAGE_NBYTES,
        batch=_BATCH,
        threads=ENGINES,
    )
    yield make_row(
        {"attached": shares[1:]},
        suite="attach",
        case=f"{ENGINES} engines: what the slowest gets of an equal share",
        unit="",
        target=Target(0.5),
        page_nbytes=_PAGE_NBYTES,
        batch=_BATCH,
        threads=ENGINES,
    )


def _publish(engines: list[Peer], shares: list[float]) -> float:
    """Let them publish for a second; return GB/s of all, and note the least share of an equal one."""
    for engine in engines:
        engine.send("publish_for", seconds=_SECONDS, page_nbytes=_PAGE_NBYTES, batch=_BATCH)
    nbytes = [int(engine.answer()) for engine in engines]
    shares.append(min(nbytes) * len(nbytes) / sum(nbytes))
    return sum(nbytes) / _SECONDS / 1e9


def _start_host(meeting: Meeting, host: Peer, pool_nbytes: int) -> None:
    settings = meeting.settings(
        HOST, attach_listen=path_of(meeting), pool_size=pool_nbytes, transports=["shm"]
    )
    host.call("start", config=settings, working_set=0)
