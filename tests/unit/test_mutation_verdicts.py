"""A planted bug counts as found if its hunter has failed because of it, and for nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mutations.__main__ import try_bug
from mutations.planted import Planted
from mutations.tree import Tree
from scripts import load_script


class _TreeThatTells(Tree):
    """Nothing is planted in it, and every hunter ends with the same exit status."""

    def __init__(self, status: int) -> None:
        self._status = status

    def plant(self, bug: Planted) -> None:
        pass

    def mend(self, bug: Planted) -> None:
        pass

    def run(self, command: list[str], *, seconds: float) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, self._status, "what it said", "")


@pytest.mark.parametrize(
    ("hunter", "status", "verdict"),
    [
        (("native", "plain", "x"), 0, "NOT FOUND"),
        (("native", "plain", "x"), 1, "found"),
        (("native", "plain", "x"), 3, "DID NOT BUILD"),
        (("pytest", "tests/x.py"), 0, "NOT FOUND"),
        (("pytest", "tests/x.py"), 1, "found"),
        (("pytest", "tests/x.py"), 4, "NOT RUN"),
        (("hunt", "x"), 1, "found"),
    ],
)
def test_a_bug_is_found_by_a_hunter_that_ran_and_failed(
    hunter: tuple[str, ...], status: int, verdict: str
) -> None:
    outcome = try_bug(_TreeThatTells(status), Planted(Path("x.patch"), "It is broken.", hunter, 60.0))
    assert (outcome.verdict, outcome.is_good) == (verdict, verdict == "found")


def test_native_tests_that_do_not_build_end_otherwise_than_those_that_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = load_script("native/test/run.py")
    monkeypatch.setattr(runner, "find", lambda tool: "/bin/false" if tool == "cmake" else None)
    assert runner.main(["plain", "x"]) == runner.DID_NOT_BUILD == 3
    assert "plain did not build" in capsys.readouterr().out
