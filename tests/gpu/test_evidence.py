"""What ``make gpu-evidence`` says: it names what failed, and what it had no time for."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import eventually
from gpu.evidence import (
    BUDGET_S,
    TESTS,
    Step,
    begin,
    keep,
    machine,
    plan,
    run_steps,
    status_of,
    steps,
    text_of,
)
from gpu.evidence_figures import Pace
from gpu.evidence_runs import NO_TIME, ROOT, objects, run_apart, run_figures, run_tests


def test_a_part_without_time_is_not_said_to_have_passed() -> None:
    for run in (run_tests, run_figures):
        assert run([], 0.0, "emulated") == {"outcome": NO_TIME}  # type: ignore[operator]


@pytest.fixture
def suite(tmp_path: Path) -> Callable[[str], str]:
    """Makes tests that tell what becomes of them, as those of this folder do; returns where they are."""

    def make(source: str) -> str:
        (tmp_path / "conftest.py").write_text("from gpu.told import *\n")
        (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\n")
        (tmp_path / "test_it.py").write_text(source)
        return str(tmp_path)

    return make


_THREE = """
import pytest
def test_good(): pass
def test_bad(): assert 1 == 2, "so it was"
def test_left_out(): pytest.skip("there is none")
"""


def test_what_failed_is_named_with_the_reason(suite: Callable[[str], str]) -> None:
    told = run_tests([suite(_THREE)], 100.0, "emulated")
    assert told["outcome"] == "failed (exit status 1)"
    assert (told["passed"], told["failures"], told["skipped"]) == (1, 1, 1)
    ((name, why),) = told["why they failed"].items()
    assert name.endswith("test_bad")
    assert "so it was" in why
    assert told["skipped because"] == ["Skipped: there is none"]


_CRASHES = """
import os, signal
def test_good(): pass
def test_crashes(): os.kill(os.getpid(), signal.SIGKILL)
def test_later(): pass
"""


def test_a_crash_leaves_what_was_seen_before_it(suite: Callable[[str], str]) -> None:
    told = run_tests([suite(_CRASHES)], 100.0, "emulated")
    assert told["outcome"].startswith("failed by signal 9: ")
    assert told["outcome"].endswith("test_crashes was under way")
    assert told["passed"] == 1


def test_tests_that_hang_are_given_up(suite: Callable[[str], str]) -> None:
    told = run_tests([suite("import threading\nthreading.Event().wait()\n")], 1.0, "emulated")
    assert told["outcome"] == "not finished in 1 s: no test was under way"


def test_whoever_is_given_up_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    said = tmp_path / "said"
    status, _, _ = run_apart(["sh", "-c", f"sleep 600 & echo $! > {said}; wait"], 2.0, {})
    assert status is None
    stat = Path(f"/proc/{said.read_text().strip()}/stat")

    def has_ended() -> bool:
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"

    eventually(has_ended, 5.0)


def test_lines_that_were_cut_are_left_out() -> None:
    assert objects('seed 1\n[{"a": 1}]\n{"a": 1}\n{"a": 2') == [{"a": 1}]


def test_a_case_that_there_is_no_time_for_is_left_out() -> None:
    pace = Pace(100.0, 3)
    assert pace.why_not(1) == ""
    assert pace.rounds(1e-6, 1) == 7
    assert pace.why_not(1000) == ""
    assert pace.rounds(30.0, 1000) == 3
    assert pace.why_not(1000).startswith("it takes some 390 s, and ")


def test_the_text_has_the_machine_the_failures_and_the_speeds() -> None:
    row = {"n": 128, "nbytes": 65536, "what": "fetched", "GB_s": 1.5, "copy_GB_s": 3.0, "ratio": 0.5}
    hits = {"what": "hits over shm", "hits": 70, "wrong": 0, "took_s": 2.5, "left_out": "100 were meant"}
    found: dict[str, Any] = {
        "device": "torch",
        "commit": "abc",
        "when": "today",
        "machine": machine(),
        "parts": {
            "tests": {"outcome": "failed (exit status 1)", "passed": 3, "failed": ["test_a.test_b"]},
            "NCCL": {"outcome": "passed", "skipped because": ["there is none"]},
            "pages": {"outcome": "passed", "figures": [row, hits]},
        },
    }
    text = text_of(found)
    assert "tests: failed (exit status 1); 3 passed" in text
    assert "test_a.test_b" in text
    assert "skipped: there is none" in text
    assert "128 x 64 KiB fetched: 1.5 GB/s, the copy 3.0 GB/s, ratio 0.5" in text
    assert "hits over shm: 70, 0 of them wrong, in 2.5 s; not finished: 100 were meant" in text
    assert "kernel: " in text


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([{"outcome": "passed"}, {"outcome": "told"}], 0),
        ([{"outcome": "passed"}, {"outcome": NO_TIME}], 2),
        ([{"outcome": "not finished in 5 s: test_a was under way", "failed": []}], 2),
        ([{"outcome": "not finished in 5 s: test_a was under way", "failed": ["test_b"]}], 1),
        ([{"outcome": "failed (exit status 3)"}, {"outcome": NO_TIME}], 1),
    ],
)
def test_the_exit_status_tells_failures_from_what_was_not_seen(
    parts: list[dict[str, Any]], status: int
) -> None:
    assert status_of({"parts": dict(enumerate(parts))}) == status


def test_a_run_that_is_cut_has_left_what_it_saw_and_names_what_it_did_not(tmp_path: Path) -> None:
    found, stem = begin([], "there is none")
    first, *others = steps()
    found["parts"][first.name] = {"outcome": "told", "says": ["a driver"]}
    keep(found, tmp_path, stem)
    kept = json.loads((tmp_path / "emulated.json").read_text())
    assert kept["parts"][first.name]["says"] == ["a driver"]
    for step in others:
        assert kept["parts"][step.name]["outcome"].startswith("not run")
        assert f"{step.name}: not run" in (tmp_path / "emulated.txt").read_text()


def test_what_is_kept_says_nothing_of_where_it_was_run(tmp_path: Path) -> None:
    found, stem = begin([], "there is none")
    says = [
        f"secret  {Path.home()}/.local/secret",
        f"nccl from {ROOT}/.venv/lib",
    ]
    found["parts"][steps()[0].name] = {"outcome": "told", "says": says}
    keep(found, tmp_path, stem)
    for suffix in ("json", "txt"):
        text = (tmp_path / f"emulated.{suffix}").read_text()
        assert "secret  ~/.local/secret" in text
        assert str(ROOT) not in text


def test_the_plan_leaves_out_the_last_steps_first() -> None:
    lines = plan(200.0).splitlines()
    assert [line.partition(":")[0] for line in lines] == [step.name for step in steps()]
    left_out = [i for i, line in enumerate(lines) if "left out" in line]
    assert left_out == list(range(left_out[0], len(lines)))


def test_a_larger_budget_gives_each_step_its_share() -> None:
    first = steps()[0].most
    assert plan(BUDGET_S).splitlines()[0].endswith(f": {first:.0f} s at most")
    assert plan(3 * BUDGET_S).splitlines()[0].endswith(f": {3 * first:.0f} s at most")
    assert plan(BUDGET_S / 3).splitlines()[0].endswith(f": {first:.0f} s at most")


def test_every_other_library_of_device_memory_has_a_part_of_its_own() -> None:
    names = [step.name for step in steps(["torch"])]
    assert "tests of pages in memory of torch" in names
    assert len(names) == len(steps()) + 3


def test_what_measures_is_alone_and_the_others_go_together() -> None:
    n_together, under_way, most_at_once, seen_alone = 3, 0, 0, []
    lock, all_there = threading.Lock(), threading.Barrier(n_together)

    def run(step: Step) -> dict[str, Any]:
        nonlocal under_way, most_at_once
        with lock:
            under_way += 1
            most_at_once = max(most_at_once, under_way)
        if step.is_alone:
            seen_alone.append(under_way)
        else:
            all_there.wait(10.0)
        with lock:
            under_way -= 1
        return {"outcome": "passed"}

    wanted = [Step(f"step {i}", 1.0, lambda *_: {}, is_alone=i % 3 == 0) for i in range(9)]
    done = [step.name for step, _ in run_steps(wanted, n_together, run)]
    assert sorted(done) == [step.name for step in wanted]
    assert most_at_once == n_together
    assert seen_alone == [1, 1, 1]
    assert [step.name for step, _ in run_steps(wanted, 1, lambda _: {})] == [step.name for step in wanted]


def test_every_test_of_devices_is_in_a_part() -> None:
    there = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert {name for names in TESTS.values() for name in names} == there
