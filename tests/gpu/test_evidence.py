"""What ``make gpu-evidence`` says: it names what failed, and what it had no time for."""

from __future__ import annotations

from typing import Any

from gpu.evidence import machine, run_tests, text_of


def test_a_part_without_time_is_not_said_to_have_passed() -> None:
    assert run_tests([], 0.0, "emulated") == {"outcome": "not run: no time was left"}


def test_tests_that_are_run_are_counted() -> None:
    told = run_tests(["-k", "a_part_without_time", "-p", "no:cacheprovider"], 100.0, "emulated")
    assert (told["outcome"], told["tests"], told["failures"], told["failed"]) == ("passed", 1, 0, [])


def test_the_text_has_the_machine_the_failures_and_the_speeds() -> None:
    speed = {"pages": 128, "page_nbytes": 65536, "fetch_GB_s": 1.5, "pinned_copy_GB_s": 3.0, "ratio": 0.5}
    found: dict[str, Any] = {
        "device": "torch",
        "commit": "abc",
        "when": "today",
        "machine": machine(),
        "parts": {"tests": {"outcome": "failed (exit status 1)", "tests": 3, "failed": ["test_a.test_b"]}},
        "speed": [speed],
    }
    text = text_of(found)
    assert "tests: failed (exit status 1); 3 tests" in text
    assert "test_a.test_b" in text
    assert "128 x 64 KiB: 1.5 GB/s, the copy 3.0 GB/s, ratio 0.5" in text
    assert "kernel: " in text
    assert "failed: no memory" in text_of(found | {"speed": "failed: no memory"})
