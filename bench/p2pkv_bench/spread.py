"""Four readers of pages that three nodes hold, with readers spread over these and without.

Each of the two is a cluster of its own, in processes of their own, and they take turns. How evenly the holders are read
is as good a figure on a busy machine as on a quiet one; what it brings in bytes is not, where all share its cores. In
the end one of the holders stands still, and what that costs a call is measured where pages are read from all three.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from p2pkv_bench.errors import BenchError
from p2pkv_bench.holding import Holding
from p2pkv_bench.peer import Meeting, Peer
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import percentile, take_turns
from p2pkv_bench.rows import KIB, MIB, Row, make_row

_READERS = 4
_HOLDERS = ("first", "second", "third")
_PAGE_NBYTES = 64 * KIB
_BATCH = 32
_N_PAGES = 128
_WORKING_SET = 64 * MIB
_STOPPED_S = 1.0
"""So long one holder stands still: it is not given up as a member meanwhile."""
_WARM_S = 2.0
"""So long readers take to look all pages up, to connect, and to know how long reads take."""


@dataclass
class _Figures:
    """Holds what the rounds of one cluster came to, a value a round."""

    read: list[float] = field(default_factory=list)  # GB/s of all readers
    busiest: list[float] = field(default_factory=list)  # what part of the bytes the busiest holder gave
    idlest: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)  # us of a call


@dataclass
class _Late:
    """Holds what rounds came to in which one of the holders stood still."""

    longest: list[float] = field(default_factory=list)  # ms, of all calls of all readers
    missed: list[float] = field(default_factory=list)  # what part of the pages


class _Crowd(Holding):
    """Holders of the same pages, and their readers."""

    def __init__(self, transport: str, *, is_spread: bool) -> None:
        with ExitStack() as undo:
            meeting = undo.enter_context(Meeting())
            common = {"transports": [transport], "buffer_size": 0, "pool_size": _WORKING_SET * 5 // 4}
            self._holders = [undo.enter_context(Peer()) for _ in _HOLDERS]
            self._readers = [undo.enter_context(Peer()) for _ in range(_READERS)]
            for name, holder in zip(_HOLDERS, self._holders, strict=True):
                holder.call("start", config=meeting.settings(name, **common), working_set=_WORKING_SET)
            for number, reader in enumerate(self._readers):
                # without hedged reads a reader knows of one holder a page
                config = meeting.settings(f"reader-{number}", hedge=is_spread, **common)
                reader.call("start", config=config, working_set=_WORKING_SET)
            for peer in (*self._holders, *self._readers):
                peer.call("wait_for", n_members=len(_HOLDERS) + _READERS)
            self._undo = undo.pop_all()

    def prepare(self) -> None:
        pages = {"page_nbytes": _PAGE_NBYTES, "prefix": "spread", "shard": _HOLDERS[0], "n_pages": _N_PAGES}
        for holder in self._holders:
            if (n_published := holder.call("publish", **pages)) != _N_PAGES:
                raise BenchError(f"{n_published} of {_N_PAGES} pages were published")
        for reader in self._readers:
            reader.call("prepare_reads", **pages)

    def read(self, seconds: float, figures: _Figures | None = None) -> float:
        """Have all readers read for so long; return the GB a second of all together."""
        for reader in self._readers:
            reader.send("read_for", seconds=seconds, batch=_BATCH)
        answers = [reader.answer() for reader in self._readers]
        gb: float = sum(answer["nbytes"] for answer in answers) / 1e9 / seconds
        if figures is not None:
            of_each: Counter[str] = Counter()
            for answer in answers:
                of_each.update(answer["by_peer"])
            parts = [of_each[name] / max(1, of_each.total()) for name in _HOLDERS]
            figures.read.append(gb)
            figures.busiest.append(max(parts))
            figures.idlest.append(min(parts))
            figures.p99.append(percentile([call for a in answers for call in a["calls"]], 99) * 1e6)
        return gb

    def read_while_one_stands_still(self, figures: _Late) -> None:
        """Have all readers read while the last holder, whose shard knows of none of the pages, does nothing."""
        for reader in self._readers:
            reader.send("read_for", seconds=2 * _STOPPED_S, batch=_BATCH, may_miss=True)
        self._holders[-1].stop()
        time.sleep(_STOPPED_S)
        self._holders[-1].resume()
        answers = [reader.answer() for reader in self._readers]
        calls = [call for answer in answers for call in answer["calls"]]
        figures.longest.append(max(calls) * 1e3)
        figures.missed.append(sum(answer["n_missed"] for answer in answers) / (len(calls) * _BATCH))


def rows(_meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure over each transport."""
    for transport in plan.transports:
        plan.tell(f"spread: {_N_PAGES} pages of {len(_HOLDERS)} holders over {transport}, {_READERS} readers")
        with _Crowd(transport, is_spread=True) as spread, _Crowd(transport, is_spread=False) as first:
            figures = {"spread": _Figures(), "first_named": _Figures()}
            crowds = {"spread": spread, "first_named": first}
            for crowd in crowds.values():
                crowd.prepare()
                crowd.read(_WARM_S)
            take_turns(
                {
                    name: partial(crowd.read, plan.load_seconds, figures[name])
                    for name, crowd in crowds.items()
                },
                plan.rounds,
            )
            late = _Late()
            for _ in range(plan.rounds):
                spread.read_while_one_stands_still(late)
        for name, what, unit in (
            ("read", "read by all", "GB/s"),
            ("busiest", "what the busiest holder gave", "part"),
            ("idlest", "what the idlest holder gave", "part"),
            ("p99", f"a call of {_BATCH}, p99", "us"),
        ):
            # the first round of each warms up, as in all suites
            values = {who: getattr(of, name)[1:] for who, of in figures.items()}
            if name == "idlest":
                del values["first_named"]  # nothing: no ratio to it
            case = f"{_READERS} readers of {_N_PAGES} pages of {len(_HOLDERS)} holders: {what}"
            yield _row(values, case, unit, transport)
        for what, unit, values_of_late in (
            ("the longest call", "ms", late.longest),
            ("pages that were missed", "part", late.missed),
        ):
            case = f"{_READERS} readers, one of {len(_HOLDERS)} holders stands still: {what}"
            yield _row({"spread": values_of_late}, case, unit, transport)


def _row(values: dict[str, list[float]], case: str, unit: str, transport: str) -> Row:
    return make_row(
        values,
        suite="spread",
        case=case,
        unit=unit,
        transport=transport,
        page_nbytes=_PAGE_NBYTES,
        batch=_BATCH,
        threads=_READERS,
    )
