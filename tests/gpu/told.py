"""Tells a file what becomes of each test as soon as it is known, for whoever may have to end the run.

``P2PKV_TESTS_TOLD`` names the file, which gets a line of JSON when a test begins and when it has ended. A conftest
imports these hooks.
"""

from __future__ import annotations

import json
import os

import pytest

_TOLD = os.environ.get("P2PKV_TESTS_TOLD", "")
_LAST_LINES = 60


def _tell(**what: object) -> None:
    if _TOLD:
        with open(_TOLD, "a") as file:
            file.write(json.dumps(what) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell(began=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    if isinstance(report.longrepr, tuple):  # of a skip: file, line and reason
        why = report.longrepr[2]
    else:
        why = "\n".join(report.longreprtext.splitlines()[-_LAST_LINES:])
    _tell(test=report.nodeid, outcome=report.outcome, why=why, seconds=round(report.duration, 1))
