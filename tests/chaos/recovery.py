"""Whether everything is found again once all faults are over, and how soon; whether processes are back at their level.

Asked of all that have a load, at once, again and again: fetch every page that its owner's publish called a hit and that
was not taken back. Nobody publishes again what its owner believes to be published, for engines don't either. Of a node
whose disk may have been full the pages count that it can fetch itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .load import HOT, N_PAGES
from .oracle import Oracle
from .processes import Level, Processes

SHARE = 0.95
"""Of every owner's pages, at every reader."""
SLACK = Level(descriptors=12, threads=8, mappings=80)
"""What a process may hold beyond its level: pooled connections, and the heaps that glibc gives their threads."""
_ANSWER_S = 10.0
START_S = 20.0
"""The most that is allowed for starting processes, where that does not count: much of it is Python's imports."""
_LEVEL_S = 15.0

Wait = Callable[[float], None]
"""Lets seconds pass while the journals are read; raises when a promise is broken."""


@dataclass(slots=True)
class Recovery:
    """Asks the nodes of a run; ``wait`` is the driver's."""

    fleet: Processes
    oracle: Oracle
    wait: Wait
    n_looks: int = 0
    missing: list[str] = field(default_factory=list)
    """What was not as it has to be when it was looked last."""

    def seconds(self, since: float) -> float:
        """Wait until everybody finds every page; return how long after ``since`` that was, infinity if it was not.

        Then ``missing`` says what is wrong. A fleet may count from when all processes were up again, if that is later.
        """
        for number in self.fleet.loaded:
            self.fleet.tell(number, do="calm")
        late = len(self.oracle.host_late)
        while True:
            asked = time.monotonic()
            if self._all_found():
                break
            host_s = sum(end - begin for begin, end in self.oracle.host_late[late:])
            if asked > self._begun(since) + self.fleet.bound_s + host_s:
                return float("inf")
            self.wait(0.3)
        since = self._begun(since)
        for number in self.fleet.loaded:
            self.fleet.tell(number, do="go")
        return max(0.0, asked - since)

    def _begun(self, since: float) -> float:
        """Return from when on everything may take the bound to be found."""
        if not self.fleet.counts_from_up:
            return since
        past = self.oracle.past.values()
        if not all(each.is_up for each in past):
            return max(since, min(time.monotonic(), since + START_S))
        return max(since, min(since + START_S, max(each.up_at for each in past)))

    def _all_found(self) -> bool:
        self.missing = self._missing()
        return not self.missing

    def _missing(self) -> list[str]:
        """Look once; return what is not as it has to be."""
        names = self.fleet.names
        down = [name for name in names if not self.oracle.past[name].is_up]
        if down:
            return [f"{name} has not started yet" for name in down]
        names = [names[number] for number in self.fleet.loaded]
        expected = {name: sorted(self.oracle.past[name].published) for name in names}
        unpublished = [
            f"{name} has published {len(pages)} of its {N_PAGES} pages"
            for name, pages in expected.items()
            if len(pages) < SHARE * N_PAGES
        ]
        if unpublished:
            return unpublished
        expected[HOT] = sorted(set().union(*(self.oracle.past[name].hot for name in names)))
        answers = self._ask(expected)
        silent = [f"{name} does not answer" for name in names if name not in answers]
        if silent:
            return silent
        return [line for name in names for line in self._short(name, expected, answers)]

    def _ask(self, pages: dict[str, list[int]]) -> dict[str, dict[str, list[int]]]:
        self.n_looks += 1
        for number in self.fleet.loaded:
            self.fleet.tell(number, do="look", id=self.n_looks, pages=pages)
        until = time.monotonic() + _ANSWER_S
        while len(self.oracle.looked[self.n_looks]) < len(self.fleet.loaded) and time.monotonic() < until:
            self.wait(0.05)
        return self.oracle.looked.pop(self.n_looks)

    def _short(
        self, reader: str, expected: dict[str, list[int]], answers: dict[str, dict[str, list[int]]]
    ) -> list[str]:
        """Say of which owners a reader found too few pages."""
        short = []
        for owner, pages in expected.items():
            has_disk = owner != HOT and self.fleet.has_disk(self.fleet.names.index(owner))
            there = set(pages) & set(answers[owner][owner]) if has_disk else set(pages)
            found = set(answers[reader][owner]) & there
            if len(found) < SHARE * len(there):
                short.append(f"{reader} finds {len(found)} of {len(there)} pages of {owner}")
        return short

    def levels(self) -> dict[str, Level]:
        """Return what every process holds now."""
        return self.fleet.levels()

    def above(self, before: dict[str, Level]) -> list[str]:
        """Wait until no process holds more than any of its kind ``before``, and the slack; return who does too long."""
        kinds = {name: self.fleet.kind_of(name) for name in before}
        ceilings = {
            kind: _ceiling([level for name, level in before.items() if kinds[name] == kind])
            for kind in set(kinds.values())
        }
        until = time.monotonic() + _LEVEL_S
        while True:
            over = [
                f"{name} holds {level}; at the quiet start at most {ceilings[kinds[name]]} with slack"
                for name, level in self.levels().items()
                if not _fits(level, ceilings[kinds[name]])
            ]
            if not over or time.monotonic() > until:
                return over
            self.wait(0.5)


def _ceiling(levels: list[Level]) -> Level:
    return Level(
        descriptors=max(level.descriptors for level in levels) + SLACK.descriptors,
        threads=max(level.threads for level in levels) + SLACK.threads,
        mappings=max(level.mappings for level in levels) + SLACK.mappings,
    )


def _fits(level: Level, ceiling: Level) -> bool:
    return (
        level.descriptors <= ceiling.descriptors
        and level.threads <= ceiling.threads
        and level.mappings <= ceiling.mappings
    )
