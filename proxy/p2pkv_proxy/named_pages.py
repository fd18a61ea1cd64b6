"""Which pages a prompt's text has, learnt from what engines say they have published: no tokenizer, no chat template.

An engine's answer to a prompt names the pages of that prompt (:mod:`p2pkv.instances.page_report`). Prompts that begin
with the same text have the same pages so far: for each block of text that was seen there stands here which report
covers it, and how many of its pages. What of these pages there still is the directory says, so that an engine that
names wrong ones, or a text that is cut where no page ends, costs a worse choice and nothing else.

How many pages the text of two prompts has in common shows when both are named: as many as have the same name. In
between it is shared out evenly.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from p2pkv.instances.page_report import PageReport

_MOST_MARKS = 100_000
"""Blocks of text; about 35 MiB."""
_MOST_NBYTES = 64 << 20
"""Of all names."""
_LIFETIME_S = 3600.0
"""A report that old says nothing any more: the model's weights or its template may be others."""
_EVERY, _FOURTH, _SIXTEENTH = slice(0, 64), slice(64, 1024, 4), slice(1024, None, 16)
"""Of a prompt's blocks, those that are looked at: a prompt of 12,000 tokens costs 140 of them rather than 375."""


@dataclass(slots=True)
class _Report:
    report: PageReport
    since: float
    n_marks: int = 0


@dataclass(slots=True)
class _Mark:
    """A text that was seen: all up to and with one block."""

    told: _Report
    n_names: int
    is_measured: bool
    """The report ends here, or another one went another way from here: else it is a guess in between."""


@dataclass(frozen=True, slots=True)
class Known:
    """The pages of a prompt's beginning, as far as they are known by name."""

    report: PageReport
    n_names: int
    n_blocks: int
    """Blocks of the prompt that they are the pages of."""

    @property
    def names(self) -> list[bytes]:
        """Return the pages' names, in their order."""
        return self.report.names(self.n_names)


class NamedPages:
    """Of bounded size: what was longest of no use goes first. One event loop uses it."""

    def __init__(
        self,
        *,
        most_marks: int = _MOST_MARKS,
        most_nbytes: int = _MOST_NBYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._marks: OrderedDict[bytes, _Mark] = OrderedDict()
        self._most_marks, self._most_nbytes = most_marks, most_nbytes
        self._now = now
        self.nbytes = 0
        """Of the names that are kept."""

    def __len__(self) -> int:
        return len(self._marks)

    def learn(self, blocks: Sequence[bytes], report: PageReport) -> None:
        """Take what an engine says of the prompt whose text has these blocks."""
        depths = _looked_at(len(blocks))
        if not depths or not report.n_names:
            return
        told = _Report(report, self._now())
        self.nbytes += len(report.packed)
        n_seen, n_common = self._common(blocks, depths, report)
        ends = {0: 0, len(blocks): report.n_names}
        if n_common:
            ends[n_seen] = n_common
            for depth in depths:
                mark = self._marks.get(blocks[depth - 1]) if depth < n_seen else None
                if mark is not None and mark.is_measured and mark.n_names <= n_common:
                    ends[depth] = mark.n_names
        at = sorted(ends)
        n_names = np.interp(depths, at, [ends[depth] for depth in at]).astype(int).tolist()
        for depth, n in zip(depths, n_names, strict=True):
            self._point(blocks[depth - 1], _Mark(told, n, depth in ends))
        self._trim()

    def find(self, blocks: Sequence[bytes]) -> Known | None:
        """Return the pages of the longest beginning that is known."""
        found = None
        oldest = self._now() - _LIFETIME_S
        for depth in _looked_at(len(blocks)):
            mark = self._marks.get(blocks[depth - 1])
            if mark is None or mark.told.since < oldest:
                break
            self._marks.move_to_end(blocks[depth - 1])
            found = Known(mark.told.report, mark.n_names, depth)
        return found

    def _common(self, blocks: Sequence[bytes], depths: Sequence[int], report: PageReport) -> tuple[int, int]:
        """Return how much of the text was seen, and how many names it has in common with what was said of that.

        None are where pages have been renamed, with new weights say: then nothing of before counts.
        """
        n_seen, last = 0, None
        for depth in depths:
            mark = self._marks.get(blocks[depth - 1])
            if mark is None:
                break
            n_seen, last = depth, mark
        return n_seen, 0 if last is None else report.n_common(last.told.report)

    def _point(self, block: bytes, mark: _Mark) -> None:
        mark.told.n_marks += 1
        before = self._marks.get(block)
        if before is not None:
            self._let_go(before.told)
        self._marks[block] = mark
        self._marks.move_to_end(block)

    def _let_go(self, told: _Report) -> None:
        told.n_marks -= 1
        if not told.n_marks:
            self.nbytes -= len(told.report.packed)

    def _trim(self) -> None:
        while self._marks and (len(self._marks) > self._most_marks or self.nbytes > self._most_nbytes):
            _, mark = self._marks.popitem(last=False)
            self._let_go(mark.told)


def _looked_at(n_blocks: int) -> list[int]:
    """Return the numbers of blocks, counted from one, after which a prompt is looked at."""
    numbers = range(1, n_blocks + 1)
    return [*numbers[_EVERY], *numbers[_FOURTH], *numbers[_SIXTEENTH]]
