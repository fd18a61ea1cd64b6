"""Each cause is in the log once a minute, with how often it was left out."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from p2pkv.limited_log import MAX_CAUSES, QUIET_S, LimitedLog


class Clock:
    """A clock that stands still."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> LimitedLog:
    return LimitedLog(logging.getLogger("a test"), clock=clock)


def test_a_cause_is_said_again_after_a_minute_with_what_was_left_out(
    log: LimitedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        log.warning("disk", "the disk of %s failed", "n1")
    clock.now += QUIET_S - 1
    log.warning("disk", "the disk of %s failed", "n1")
    clock.now += 1
    log.warning("disk", "the disk of %s failed", "n1")
    assert caplog.messages == [
        "the disk of n1 failed",
        "the disk of n1 failed (and 5 more of the kind since the last such line)",
    ]
    clock.now += QUIET_S
    log.warning("disk", "the disk of %s failed", "n1")
    assert caplog.messages[-1] == "the disk of n1 failed"


def test_other_causes_are_said_meanwhile(log: LimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    log.warning(("read", "n1"), "one")
    log.error(("read", "n2"), "another", exc_info=ValueError("why"))
    assert caplog.messages == ["one", "another"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    assert "ValueError: why" in caplog.text
    assert {record.filename for record in caplog.records} == {Path(__file__).name}


def test_causes_without_end_are_one_cause(
    log: LimitedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(1000):
        log.warning(i, "cause %d", i)
    assert len(caplog.messages) == MAX_CAUSES + 1
    clock.now += QUIET_S
    log.warning("a new one", "they were forgotten")
    assert caplog.messages[-1] == "they were forgotten"
    assert len(log._causes) == 1


def test_threads_say_it_once(log: LimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: log.warning("same", "once"), range(200)))
    assert caplog.messages == ["once"]
