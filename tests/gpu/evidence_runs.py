"""How parts of evidence are run: in processes of their own that can be given up, and what they had seen is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fake_cuda import fake_cuda

ROOT = Path(__file__).parents[2]
NO_TIME = "not run: no time was left"
_TEST_S = 60.0
"""One test that hangs leaves the others of its part some time: so much, or half of the part's where that is more."""
_SLOWEST = 5
_under_way: set[int] = set()
"""Process groups."""


def run_apart(
    command: Sequence[str], seconds: float, environ: Mapping[str, str]
) -> tuple[int | None, str, str]:
    """Run a command; return its exit status, and what it said on stdout and stderr.

    The status is None if it had not ended after ``seconds``: then it was killed, with all that it had started, whose
    device memory the next part needs.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environ, stdout=out, stderr=err, start_new_session=True
        ) as process:
            _under_way.add(process.pid)
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                _under_way.discard(process.pid)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return status, *texts


def end_all() -> None:
    """Kill what any thread runs apart, with all that it has started."""
    for group in list(_under_way):
        os.killpg(group, signal.SIGKILL)


def objects(text: str) -> list[dict[str, Any]]:
    """Return what stands in the lines that are whole and of JSON."""
    lines = (line for line in text.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n"))
    return [json.loads(line) for line in lines]


def run_tests(arguments: Sequence[str], seconds: float, kind: str) -> dict[str, Any]:
    """Run some tests; return how many passed, which failed and why, and which was under way if time was up."""
    if seconds <= 0:
        return {"outcome": NO_TIME}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="p2pkv-evidence-") as folder:
        told = Path(folder) / "told"
        told.touch()
        status, _, errors = run_apart(
            [sys.executable, "-m", "pytest", "-q", f"--timeout={max(_TEST_S, seconds / 2):.0f}", *arguments],
            seconds,
            {"P2PKV_TEST_GPU": "0" if kind == "emulated" else kind, "P2PKV_TESTS_TOLD": str(told)},
        )
        lines = objects(told.read_text())
    ended = [line for line in lines if "test" in line]
    failed = {line["test"]: line["why"] for line in ended if line["outcome"] == "failed"}
    skipped = {line["test"]: line["why"] for line in ended if line["outcome"] == "skipped"}
    passed = {line["test"] for line in ended if line["outcome"] == "passed"} - set(failed)
    by_time = sorted((line for line in ended if line["seconds"] >= 1), key=lambda line: -line["seconds"])
    found = {
        "seconds": round(time.monotonic() - began, 1),
        "passed": len(passed),
        "failures": len(failed),
        "skipped": len(skipped),
        "failed": [f"{test}: {why.strip().splitlines()[-1]}" for test, why in failed.items()],
        "why they failed": failed,
        "skipped because": sorted(set(skipped.values())),
        "slowest": [f"{line['test']}: {line['seconds']} s" for line in by_time[:_SLOWEST]],
    }
    under_way = [line["began"] for line in lines if "began" in line][-1:] or ["no test"]
    if status is None:
        return {"outcome": f"not finished in {seconds:.0f} s: {under_way[0]} was under way", **found}
    if status < 0:  # a crash, most likely
        return {"outcome": f"failed by signal {-status}: {under_way[0]} was under way", **found}
    if status and not failed:
        found["failed"] = errors.strip().splitlines()[-3:]
    return {"outcome": "passed" if status == 0 else f"failed (exit status {status})", **found}


def run_doctor(seconds: float, kind: str) -> dict[str, Any]:
    """Keep what ``p2pkv doctor`` says."""
    if seconds <= 0:
        return {"outcome": NO_TIME}
    began = time.monotonic()
    settings = {"P2PKV_CUDA_LIBRARY": fake_cuda().path} if kind == "emulated" else {}
    status, says, errors = run_apart([sys.executable, "-m", "p2pkv", "doctor"], seconds, settings)
    return {
        "outcome": "told" if status in (0, 1) else _failed(status, seconds),
        "seconds": round(time.monotonic() - began, 1),
        "says": says.splitlines(),
        "failed": errors.strip().splitlines()[-3:] if status not in (0, 1) else [],
    }


def run_figures(what: str, seconds: float, kind: str) -> dict[str, Any]:
    """Measure, in so many seconds less what starting and ending takes; keep the figures that came."""
    if seconds <= 0:
        return {"outcome": NO_TIME}
    began = time.monotonic()
    command = [sys.executable, "-m", "gpu.evidence_figures", what, "--kind", kind]
    status, says, errors = run_apart([*command, "--seconds", f"{0.75 * seconds:.1f}"], seconds, {})
    rows = objects(says)
    problems = [row["problem"] for row in rows if row.get("problem")]
    left_out = [row for row in rows if "left_out" in row]
    outcome = "passed" if status == 0 and rows else _failed(status, seconds)
    if outcome == "passed" and left_out:
        outcome = f"{len(left_out)} of {len(rows)} not finished, for want of time"
    if problems:
        outcome = "failed"
    return {
        "outcome": outcome,
        "seconds": round(time.monotonic() - began, 1),
        "figures": rows,
        "failed": problems or (errors.strip().splitlines()[-3:] if status else []),
    }


def _failed(status: int | None, seconds: float) -> str:
    return f"not finished in {seconds:.0f} s" if status is None else f"failed (exit status {status})"
