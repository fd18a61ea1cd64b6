"""What ``make gpu-evidence`` says: it names what failed, and what it had no time for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu.evidence import ROOT, begin, keep, machine, plan, run_tests, steps, text_of


def test_a_part_without_time_is_not_said_to_have_passed() -> None:
    assert run_tests([], 0.0, "emulated") == {"outcome": "not run: no time was left"}


def test_tests_that_are_run_are_counted() -> None:
    told = run_tests(["tests/gpu", "-k", "a_part_without_time", "-p", "no:cacheprovider"], 100.0, "emulated")
    assert (told["outcome"], told["tests"], told["failures"], told["failed"]) == ("passed", 1, 0, [])


def test_the_text_has_the_machine_the_failures_and_the_speeds() -> None:
    row = {"n": 128, "nbytes": 65536, "what": "fetched", "GB_s": 1.5, "copy_GB_s": 3.0, "ratio": 0.5}
    found: dict[str, Any] = {
        "device": "torch",
        "commit": "abc",
        "when": "today",
        "machine": machine(),
        "parts": {
            "tests": {"outcome": "failed (exit status 1)", "tests": 3, "failed": ["test_a.test_b"]},
            "NCCL": {"outcome": "passed", "skipped because": ["there is none"]},
            "pages": {"outcome": "passed", "figures": [row]},
        },
    }
    text = text_of(found)
    assert "tests: failed (exit status 1); 3 tests" in text
    assert "test_a.test_b" in text
    assert "skipped: there is none" in text
    assert "128 x 64 KiB fetched: 1.5 GB/s, the copy 3.0 GB/s, ratio 0.5" in text
    assert "kernel: " in text


def test_a_run_that_is_cut_has_left_what_it_saw_and_names_what_it_did_not(tmp_path: Path) -> None:
    found, stem = begin("emulated", "there is none")
    first, *others = steps()
    found["parts"][first.name] = {"outcome": "told", "says": ["a driver"]}
    keep(found, tmp_path, stem)
    kept = json.loads((tmp_path / "emulated.json").read_text())
    assert kept["parts"][first.name]["says"] == ["a driver"]
    for step in others:
        assert kept["parts"][step.name]["outcome"].startswith("not run")
        assert f"{step.name}: not run" in (tmp_path / "emulated.txt").read_text()


def test_what_is_kept_says_nothing_of_where_it_was_run(tmp_path: Path) -> None:
    found, stem = begin("emulated", "there is none")
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
