"""Exists: one client at a time asks another process's shard, idle and while that process can't run Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from p2pkv_bench.echo import EchoClient
from p2pkv_bench.errors import BenchError
from p2pkv_bench.keys import keys_at
from p2pkv_bench.pair import OWNER, Pair
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import percentile, take_turns, timed_calls
from p2pkv_bench.rows import MIB, Row, Target, make_row

_KEYS = (1, 32, 128, 1024)
_ECHO = "bare ZMQ + CURVE echo"
_PAGE_NBYTES = 4096
_CALLS = 400
_WORKING_SET = 64 * MIB


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure the median call of each round, beside an echo of as many bytes."""
    with (
        Pair(meeting, plan.transports[0], _WORKING_SET) as pair,
        EchoClient(*pair.owner.call("serve_echo")) as echo,
    ):
        keys = published(pair, max(_KEYS))
        for n_keys in _KEYS:
            plan.tell(f"exists, {n_keys} keys")
            question = echo.question(n_keys)
            contestants = {
                "p2pkv": lambda n=n_keys: _median_us(lambda: exists_all(pair, keys[:n])),
                _ECHO: lambda question=question: _median_us(lambda: echo.ask(question)),
            }
            figures = take_turns(contestants, plan.rounds)
            target = Target(1.3, _ECHO, at_most=True) if n_keys == 128 else None
            yield make_row(
                figures, suite="exists", case="median call", unit="us", batch=n_keys, target=target
            )
            rate = {"p2pkv": [n_keys / us for us in figures["p2pkv"]]}
            target = Target(3.0) if n_keys == 1024 else None
            yield make_row(rate, suite="exists", case="keys", unit="M/s", batch=n_keys, target=target)


def rows_with_busy_owner(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure the slowest hundredth of calls while the owner's interpreter is held, beside an idle one."""
    with Pair(meeting, plan.transports[0], _WORKING_SET) as pair:
        keys = published(pair, 128)
        plan.tell(f"exists, 128 keys, with the owner's GIL held for {plan.gil_seconds:g} s")
        idle = _p99_us(pair, keys, plan.gil_seconds)
        pair.owner.send("hold_gil", seconds=plan.gil_seconds + 0.5)
        time.sleep(0.25)  # the command is read and the GIL is held by then
        held = _p99_us(pair, keys, plan.gil_seconds)
        pair.owner.answer()
    figures = {"p2pkv": held, "idle": idle}
    target = Target(2.0, "idle", at_most=True)
    yield make_row(figures, suite="gil", case="p99, owner's GIL held", unit="us", batch=128, target=target)


def published(pair: Pair, n: int) -> list[str]:
    """Have the owner publish ``n`` small pages; return their keys."""
    keys = keys_at(pair.node, OWNER, "exists", n)
    if pair.owner.call("publish", page_nbytes=_PAGE_NBYTES, prefix="exists", shard=OWNER, n_pages=n) != n:
        raise BenchError("the pages to look up found no room")
    return keys


def exists_all(pair: Pair, keys: list[str]) -> None:
    """Look up keys; raises BenchError if any was not found."""
    if not pair.node.exists(keys).all():
        raise BenchError("pages that are there were not found")


def _median_us(call: Callable[[], object]) -> float:
    return percentile(timed_calls([call] * _CALLS), 50) * 1e6


def _p99_us(pair: Pair, keys: list[str], seconds: float) -> list[float]:
    """Return the 99th percentile of each fifth of the time."""
    figures = []
    for _ in range(5):
        calls: list[float] = []
        until = time.perf_counter() + seconds / 5
        while time.perf_counter() < until:
            calls += timed_calls([lambda: exists_all(pair, keys)] * 20)
        figures.append(percentile(calls, 99) * 1e6)
    return figures
