"""What is said of errors that an engine must not see."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from p2pkv.errors import UsageError
from p2pkv.integrations.boundary import Boundary, guarded
from p2pkv.integrations.vllm_connector.installed import log_with_the_engine
from p2pkv.metrics import Metrics


def test_each_cause_is_said_once_a_minute_and_all_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    boundary = Boundary("an engine", Metrics(), clock=lambda: now[0])
    for second in range(0, 150, 10):
        now[0] = float(second)
        boundary.note("get", UsageError("no such row"))
    boundary.note("get", UsageError("another cause"))
    said = [message for message in caplog.messages if "no such row" in message]
    assert ["more of the kind" in message for message in said] == [False, True, True]
    assert any("UsageError: another cause" in message for message in caplog.messages)
    counted = boundary._metrics.counters()
    assert counted['p2pkv_failed_calls_total{operation="get",cause="UsageError"}'] == 16


def test_a_guarded_method_returns_its_miss_and_the_miss_is_nobody_elses() -> None:
    class Engine:
        def __init__(self) -> None:
            self.boundary = Boundary("an engine", Metrics())

        @guarded("find", miss=([], None))
        def find(self, key: str, *, is_broken: bool) -> tuple[list[str], None]:
            """Find it."""
            if is_broken:
                raise UsageError("no such key")
            return [key], None

    engine = Engine()
    assert engine.find("a", is_broken=False) == (["a"], None)
    first, second = engine.find("a", is_broken=True), engine.find("a", is_broken=True)
    assert first == second == ([], None)
    first[0].append("what an engine does with it")
    assert second == ([], None)
    counted = engine.boundary._metrics.counters()
    assert counted['p2pkv_failed_calls_total{operation="find",cause="UsageError"}'] == 2
    assert (Engine.find.__name__, Engine.find.__doc__) == ("find", "Find it.")


def test_lines_are_written_as_vllm_writes_its_own(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    ours, theirs = logging.getLogger("p2pkv"), logging.getLogger("vllm")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # vLLM's root logger has none
    for logger in (ours, theirs):
        monkeypatch.setattr(logger, "handlers", [])
        request.addfinalizer(partial(logger.setLevel, logger.level))
    log_with_the_engine()
    assert not ours.handlers, "there is no vLLM"
    written: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    handler = Handler()
    handler.setFormatter(logging.Formatter("%(levelname)s 11-23 06:00:00 [%(name)s] %(message)s"))
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    log_with_the_engine()
    log_with_the_engine()
    logging.getLogger("p2pkv.integrations.boundary").info("a line")
    assert written == ["INFO 11-23 06:00:00 [p2pkv.integrations.boundary] a line"]
