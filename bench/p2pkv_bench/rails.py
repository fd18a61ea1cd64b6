"""Measures what a batch loses when one of two rails to its owner is cut: tcp between two network namespaces.

A reader fetches the same pages over and over; at a random moment one cable is cut. What counts is the longest batch
from then on until the cable is healed, beyond the median of those before. The same is taken of as long a time without
a cut: what this machine adds by itself.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from p2pkv_bench.cables import CUTS, Cables, unavailable
from p2pkv_bench.errors import BenchError
from p2pkv_bench.peer import Meeting, Peer
from p2pkv_bench.plan import Plan
from p2pkv_bench.rail_ends import DEADLINE, N_PAGES, PAGE_NBYTES
from p2pkv_bench.rounds import percentile
from p2pkv_bench.rows import Row, Spread, Target

_CUTS_A_ROUND = 12
"""So that the five rounds of a run make sixty cuts."""
_AT_MOST_MS = 50.0
_WINDOW_S = 0.5
_WARM_S = 0.4
_CARRY_S = 30.0
_MOMENTS = random.Random(1)  # noqa: S311 - no secret
Batch = tuple[float, float, int]


@dataclass(frozen=True, slots=True)
class Episode:
    """One cut; milliseconds."""

    usual: float
    added: float
    added_without: float
    n_missed: int


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Cut one of two rails at a time, in each of three ways in turn."""
    if (why := unavailable()) is not None:
        plan.tell(f"rails: {why}")
        return
    episodes: dict[str, list[Episode]] = {how: [] for how in CUTS}
    with Cables(3) as cables, ExitStack() as undo:
        owner, reader = (
            undo.enter_context(Peer("p2pkv_bench.rail_ends", prefix=cables.inside(place))) for place in "ab"
        )
        owner.call("start", config=_settings(meeting, cables, "a", "owner"), n_members=1)
        if owner.call("publish") != N_PAGES:
            raise BenchError("the owner's pool has no room for its pages")
        for number in range(plan.rounds * _CUTS_A_ROUND):
            how = CUTS[number % len(CUTS)]
            plan.tell(f"rails: cut {number + 1}, {how}")
            reader.call("start", config=_settings(meeting, cables, "b", f"reader-{number}"), n_members=2)
            episodes[how].append(_cut_once(cables, reader, how, number % 2))
    for how, of_kind in episodes.items():
        yield from _summary(how, of_kind)
    yield from _summary("all", [each for of_kind in episodes.values() for each in of_kind])


def _settings(meeting: Meeting, cables: Cables, place: str, node_id: str) -> dict[str, object]:
    return meeting.settings(
        node_id,
        listen=f"{cables.address(place, 0)}:{7083 if place == 'a' else 0}",
        join=[f"{cables.address('a', 0)}:7083"],
        transports=["tcp"],
        transport_options={"tcp": {"addresses": [cables.address(place, cable) for cable in (1, 2)]}},
        pool_size="16MiB",
        deadline=DEADLINE,
    )


def _cut_once(cables: Cables, reader: Peer, how: str, rail: int) -> Episode:
    _wait_until_both_carry(reader)
    reader.call("begin")
    time.sleep(_WARM_S + _WINDOW_S + _MOMENTS.random() * 0.1)
    before = time.monotonic()
    cables.cut(how, 1 + rail)
    time.sleep(_WINDOW_S)
    after = time.monotonic()
    batches: list[Batch] = reader.call("end")
    cables.heal(how, 1 + rail)
    quiet = [batch for batch in batches if batch[1] <= before]
    usual = median(ended - began for began, ended, _ in quiet)
    without = _longest(quiet, before - _WINDOW_S)
    return Episode(
        usual * 1e3,
        (_longest([batch for batch in batches if batch[0] < after], before) - usual) * 1e3,
        (without - usual) * 1e3,
        sum(batch[2] for batch in batches),
    )


def _longest(batches: Sequence[Batch], since: float) -> float:
    return max((ended - began for began, ended, _ in batches if ended > since), default=0.0)


def _wait_until_both_carry(reader: Peer) -> None:
    until = time.monotonic() + _CARRY_S
    names = [f'p2pkv_rail_bytes_total{{transport="tcp",rail="{rail}"}}' for rail in (0, 1)]
    while time.monotonic() < until:
        before = reader.call("rails")
        # a reader that has just joined may not be told yet where the pages are
        n_missed = reader.call("fetch_once")
        after = reader.call("rails")
        if n_missed == 0 and all(after.get(name, 0) > before.get(name, 0) for name in names):
            return
    raise BenchError(f"not both rails carry bytes: {json.dumps(reader.call('rails'))}")


def _summary(how: str, episodes: Sequence[Episode]) -> Iterator[Row]:
    n = len(episodes)
    added = [each.added for each in episodes]
    without = [each.added_without for each in episodes]
    for percent, target in ((50, None), (99, Target(_AT_MOST_MS, at_most=True))):
        yield _row(f"{how}: added by {n} cuts, p{percent}", "ms", added, percentile(added, percent), target)
    yield _row(f"{how}: as long without a cut, p99", "ms", without, percentile(without, 99), None)
    missed = [float(each.n_missed) for each in episodes]
    yield _row(f"{how}: pages missed", "pages", missed, sum(missed), Target(0.0, at_most=True))


def _row(case: str, unit: str, values: Sequence[float], figure: float, target: Target | None) -> Row:
    return Row(
        suite="rails",
        case=case,
        unit=unit,
        value=Spread(figure, min(values), max(values)),
        transport="tcp",
        page_nbytes=PAGE_NBYTES,
        batch=N_PAGES,
        target=target,
    )
