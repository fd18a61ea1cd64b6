"""A plugin of pytest that finds tests that fail by chance: their own thread loses the processor between its lines.

A test that starts something and asks, or tells it, a moment later mostly comes in time: on a busy machine, once in a
thousand runs, it does not. Here it is late in most runs. ``make test-shaken SEED=n`` loads this; the same seed and
test draw the same pauses, though what runs beside them is the machine's doing.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from p2pkv.testing.lateness import Lateness

_SHARE = 0.12
"""This share of the lines is paused at."""

_LONGEST = 0.06
"""Seconds: longer than threads take to hand something on, shorter than what promises leave for lateness."""

_MOST = 0.8
"""Seconds: no test is paused for longer altogether, however many lines its loops run."""

_OF_TESTS = (Path(__file__).parents[1], Path(__file__).parents[2] / "p2pkv" / "testing")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shaken", default="1", metavar="SEED", help="the seed of the pauses, with -p shaken")


class _Timed:
    """Counts the promises about time that are judged now: a pause would count against them."""

    n = 0

    @classmethod
    def watch(cls, patch: pytest.MonkeyPatch) -> None:
        enter, leave = Lateness.__enter__, Lateness.__exit__

        def entered(late: Lateness) -> Lateness:
            cls.n += 1
            return enter(late)

        def left(late: Lateness, *exc_info: object) -> None:
            cls.n -= 1
            leave(late, *exc_info)

        patch.setattr(Lateness, "__enter__", entered)
        patch.setattr(Lateness, "__exit__", left)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    homes = (str(item.path), *(f"{home}/" for home in _OF_TESTS))
    pauses = _Pauses(f"{item.config.getoption('--shaken')} {item.nodeid}", homes)
    with pytest.MonkeyPatch.context() as patch:
        _Timed.watch(patch)
        sys.settrace(pauses.enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)


class _Pauses:
    """Pauses one test, in the code below ``homes`` alone and in the thread that runs it."""

    def __init__(self, seed: str, homes: tuple[str, ...]) -> None:
        self._random = random.Random(seed)
        self._left = _MOST
        # Some tests have a clock and a sleep of their own.
        self._sleep = time.sleep
        self._homes = homes

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._step if frame.f_code.co_filename.startswith(self._homes) else None

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line" or _Timed.n or self._random.random() >= _SHARE:
            return self._step
        seconds: float = _LONGEST * self._random.random() ** 2
        self._left -= seconds
        self._sleep(seconds)
        if self._left > 0:
            return self._step
        # A traced loop is ten times slower; what is left of this test goes on as ever.
        sys.settrace(None)
        return None
