"""Measures targets in turn, round after round, so that a busy moment of the machine meets all of them."""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from p2pkv_bench.serving import counters
from p2pkv_bench.serving.client import Answer, Target, drive
from p2pkv_bench.serving.figures import Figures, Promise, figures
from p2pkv_bench.serving.workload import Arrival, Load, arrivals

_REQUEST_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    targets: tuple[Target, ...]
    load: Load
    rounds: int
    promise: Promise
    metrics: tuple[str, ...] = ()
    """Metrics pages of the p2pkv nodes that compute prompts."""
    tell: Callable[[str], None] = lambda what: None


class _Sum:
    """What one target has done so far."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.seconds = 0.0
        self.pages: Counter[str] = Counter()
        self.router: Counter[str] = Counter()


def measure(plan: Plan) -> list[Figures]:
    """Run every round on every target. The first target of a round is another one each time."""
    sums = {target.name: _Sum() for target in plan.targets}
    run_id = secrets.token_hex(4)
    for number in range(plan.rounds):
        turn = number % len(plan.targets)
        for target in (*plan.targets[turn:], *plan.targets[:turn]):
            # all rounds of a target begin alike: what a trace shares between rounds is still shared
            load = arrivals(plan.load, number, f"{run_id} {target.name} ")
            _round(plan, target, load, sums[target.name], number)
    return [
        figures(
            name,
            total.answers,
            total.seconds,
            plan.promise,
            dict(total.pages),
            counters.overhead(total.router),
        )
        for name, total in sums.items()
    ]


def _round(plan: Plan, target: Target, load: Sequence[Arrival], total: _Sum, number: int) -> None:
    def tell(n_sent: int) -> None:
        plan.tell(
            f"round {number + 1} of {plan.rounds}, {target.name}: {n_sent} of {len(load)} requests sent"
        )

    router = tuple(f"{url}/metrics" for url in target.urls)
    before, router_before = counters.read(plan.metrics), counters.read(router)
    began = time.monotonic()
    total.answers += _run(drive(target, load, timeout=_REQUEST_S, tell=tell))
    total.seconds += time.monotonic() - began
    total.pages.update(counters.pages(counters.grown(before, counters.read(plan.metrics))))
    total.router.update(counters.grown(router_before, counters.read(router)))


def _run(driving: Coroutine[object, object, list[Answer]]) -> list[Answer]:
    """Run it so that the clients cost little: their own pauses would be taken for those of what is measured."""
    gc.collect()
    gc.freeze()
    try:
        if find_spec("uvloop") is None:
            return asyncio.run(driving)
        import uvloop

        return uvloop.run(driving)
    finally:
        gc.unfreeze()
