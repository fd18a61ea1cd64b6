"""One run that says what was seen of device memory on this machine: the tests, the hunts, NCCL, and how fast bytes go.

``make gpu-evidence`` runs it, on a real device or, without one, on the emulated driver, whose speed says nothing. All
parts together end within nine minutes, for machines that are lent by the minute. They are in order of worth, each has a
limit, and after each the files are written anew: a run that is cut short leaves what it has seen, and names what it has
not. ``--plan`` tells the order, and what is left out when all is as slow as it may be. On a machine of many cores those
that measure nothing go together (``--together``), and the speeds come alone, before and after. The files are made to be
kept: ``docs/evidence/NAME.json`` for programs, ``NAME.txt`` for people.

The exit status is 1 if something failed, and 2 if nothing did but not all was seen.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from device_buffers import find_real
from gpu.evidence_runs import ROOT, end_all, run_doctor, run_figures, run_tests

BUDGET_S = 540.0
_CORES_OF_A_STEP = 2
"""A step has several processes: so many cores each, and steps at a time don't slow each other down."""
_LIBRARIES = (
    "p2pkv",
    "numpy",
    "torch",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
TESTS = {
    "pages": (
        "test_device_pages.py",
        "test_attached_devices.py",
        "test_attached_devices_apart.py",
        "test_direct_pages.py",
        "test_direct_publishing.py",
        "test_streams.py",
        "test_driver_failures.py",
        "test_overlapping_rounds.py",
        "test_device_hunts.py",
        "test_gpu_findings.py",
        "test_mig.py",
    ),
    "rows": (
        "test_device_transfers.py",
        "test_device_transfer_faults.py",
        "test_cuda_ipc.py",
        "test_gpudirect.py",
        "test_gpudirect_findings.py",
    ),
    "engines": ("test_vllm_on_devices.py", "test_engine_caches.py", "test_sglang_pd_on_devices.py"),
    "libraries": ("test_torch_memory.py",),
    "NCCL": ("test_nccl_between_processes.py",),
}
"""The files of ``tests/gpu``, by what they are about."""


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    most: float
    """The most seconds that it may take."""
    run: Callable[[float, str], dict[str, Any]]
    """``(seconds, kind)`` to what was seen, which has an ``outcome``."""
    is_alone: bool = False
    """Whether nothing else may run beside it: it measures, or tells what an idle machine can do."""


def steps(others: Sequence[str] = ()) -> list[Step]:
    """Return all steps, in order of worth; ``others``: kinds of real device memory beside the first."""
    of_others = [
        Step(f"tests of {about} in memory of {other}", 60.0, run_of(about, other))
        for about in ("pages", "rows", "engines")
        for other in others
    ]
    return [
        Step("what this machine can do", 30.0, run_doctor, is_alone=True),
        Step("tests of pages in device memory", 90.0, run_of("pages")),
        Step("speed of pages in device memory", 60.0, figures("pages"), is_alone=True),
        Step("speed of publishes through a host's node", 30.0, figures("attached"), is_alone=True),
        Step("hunt into device memory over shm, 50,000 hits", 60.0, figures("hunt-shm")),
        Step("tests of rows from device to device", 80.0, run_of("rows")),
        Step("speed of rows from device to device", 50.0, figures("rows"), is_alone=True),
        Step("hunt between processes' device memory, either of which is killed", 60.0, figures("hunt-rows")),
        Step("hunt into device memory by a kernel, 50,000 hits", 60.0, figures("hunt-kernel")),
        Step("hunt into device memory over tcp, 50,000 hits", 60.0, figures("hunt-tcp")),
        Step("tests of engines with caches in device memory", 60.0, run_of("engines")),
        Step("tests of what torch and CuPy do with a device", 60.0, run_of("libraries")),
        *of_others,
        Step("tests of NCCL between two processes", 90.0, run_of("NCCL")),
    ]


def most(step: Step, budget: float) -> float:
    """Return the most seconds that a step may take of so many for all: a slower machine is given more of both."""
    return step.most * max(1.0, budget / BUDGET_S)


def plan(budget: float, others: Sequence[str] = ()) -> str:
    """Say in which order the steps come, and which have no time left where all before took the most they may."""
    lines, left = [], budget
    for step in steps(others):
        seconds = most(step, budget)
        if left <= 0:
            says = "left out if all before it take as long as they may"
        elif left < seconds:
            says = f"{left:.0f} s of {seconds:.0f} if all before it take as long as they may"
        else:
            says = f"{seconds:.0f} s at most"
        left -= seconds
        lines.append(f"{step.name}: {says}")
    return "\n".join(lines)


def run_steps(
    wanted: Sequence[Step], n_together: int, run: Callable[[Step], dict[str, Any]]
) -> Iterator[tuple[Step, dict[str, Any]]]:
    """Yield each step with what was seen of it: so many at a time, but for those that must be alone.

    With more than one at a time, those that must be alone come first.
    """
    if n_together > 1:
        wanted = sorted(wanted, key=lambda step: not step.is_alone)
    alone = [step for step in wanted if step.is_alone or n_together == 1]
    for step in alone:
        yield step, run(step)
    with ThreadPoolExecutor(max(1, n_together)) as threads:
        running = {threads.submit(run, step): step for step in wanted if step not in alone}
        for future in as_completed(running):
            yield running[future], future.result()


def machine() -> dict[str, str]:
    """Say what the run was made on."""
    found = {"cpu": platform.processor() or platform.machine(), "kernel": platform.release()}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            found["cpu"] = line.partition(":")[2].strip()
            break
    found |= {"python": platform.python_version(), "cores": str(os.cpu_count())}
    query = "name,driver_version,memory.total,mig.mode.current,pcie.link.gen.current,pcie.link.width.current"
    try:
        told = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        found["gpu"] = told.stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        found["gpu"] = f"none: {error}"
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def run_of(about: str, other: str = "") -> Callable[[float, str], dict[str, Any]]:
    files = [f"tests/gpu/{name}" for name in TESTS[about]]
    return lambda seconds, kind: run_tests(files, seconds, other or kind)


def figures(what: str) -> Callable[[float, str], dict[str, Any]]:
    return lambda seconds, kind: run_figures(what, seconds, kind)


def text_of(found: dict[str, Any]) -> str:
    """Write it for people."""
    lines = [f"Device memory: {found['device']}", f"commit {found['commit']}, {found['when']}", ""]
    lines += [f"{name}: {value}" for name, value in found["machine"].items()]
    for name, part in found["parts"].items():
        numbers = [f"{part[key]} {key}" for key in ("passed", "failures", "skipped") if key in part]
        said = "; ".join([part["outcome"], *([", ".join(numbers)] if numbers else [])])
        lines += ["", f"{name}: {said} ({part.get('seconds', 0)} s)"]
        lines += [f"  {line}" for line in part.get("failed", [])]
        lines += [f"  skipped: {reason}" for reason in part.get("skipped because", [])]
        lines += [f"  {line}" for line in part.get("says", [])]
        lines += [f"  {_text_of_figure(figure)}" for figure in part.get("figures", [])]
    return "\n".join(lines) + "\n"


def _text_of_figure(figure: dict[str, Any]) -> str:
    says = figure["what"]
    if "n" in figure:
        says = f"{figure['n']} x {figure['nbytes'] >> 10} KiB {says}"
    if "GB_s" in figure:
        says += f": {figure['GB_s']} GB/s, the copy {figure['copy_GB_s']} GB/s, ratio {figure['ratio']}"
    if "hits" in figure:
        says += f": {figure['hits']}, {figure['wrong']} of them wrong, in {figure['took_s']} s"
    if "kills" in figure:
        says += f"; {sum(figure['kills'].values())} processes were killed meanwhile"
    return says + (f"; not finished: {figure['left_out']}" if "left_out" in figure else "")


def without_places(text: str) -> str:
    """Leave out where on this machine things lie: that is nobody's business."""
    places = {str(ROOT): ".", sys.prefix: "VENV", str(Path.home()): "~"}
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, places[place])
    return text


def keep(found: dict[str, Any], into: Path, stem: str) -> None:
    """Write both files, each at once: whoever ends the run finds one that is whole."""
    into.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(found, indent=2) + "\n"), (".txt", text_of(found))):
        fresh = into / f".{stem}{suffix}"
        fresh.write_text(without_places(text))
        fresh.replace(into / f"{stem}{suffix}")


def begin(kinds: Sequence[str], reason: str, commit: str = "") -> tuple[dict[str, Any], str]:
    """Return what is known before the first step, and the files' name; ``kinds``: of real device memory."""
    if not commit:
        describe = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(
            describe, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    found: dict[str, Any] = {
        "device": " and ".join(kinds) or f"emulated driver ({reason}): speeds say nothing",
        "commit": commit or "unknown",
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": machine(),
        "parts": {step.name: {"outcome": "not run: the run was cut before it"} for step in steps(kinds[1:])},
    }
    gpu = found["machine"]["gpu"].split(",")[0].lower().replace(" ", "-")
    return found, gpu if kinds else "emulated"


def status_of(found: dict[str, Any]) -> int:
    """Return the exit status: 0 if all was seen and is well, 1 if something failed, 2 if not all was seen."""
    parts = found["parts"].values()
    if any(part.get("failed") or part["outcome"].startswith("failed") for part in parts):
        return 1
    return 0 if all(part["outcome"] in ("passed", "told") for part in parts) else 2


def main() -> int:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "docs/evidence", help="folder of the files")
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_S,
        help="seconds for all steps together; each gets its share of what is more than 540",
    )
    parser.add_argument(
        "--together",
        type=int,
        default=max(1, (os.cpu_count() or 1) // _CORES_OF_A_STEP),
        help="steps at a time, of those that measure nothing",
    )
    parser.add_argument("--plan", action="store_true", help="tell the order of the steps, and run none")
    parser.add_argument("--commit", default="", help="what is tried, where there is no git to say it")
    options = parser.parse_args()
    kinds, reason = find_real()
    if options.plan:
        print(plan(options.budget, kinds[1:]))
        return 0

    def end(*_: object) -> None:  # whoever ends this run ends what it has started
        end_all()
        sys.exit(1)

    signal.signal(signal.SIGTERM, end)
    until = time.monotonic() + options.budget
    found, stem = begin(kinds, reason, options.commit)

    def run(step: Step) -> dict[str, Any]:
        seconds = min(most(step, options.budget), until - time.monotonic())
        return step.run(seconds, kinds[0] if kinds else "emulated")

    for step, seen in run_steps(steps(kinds[1:]), options.together, run):
        found["parts"][step.name] = seen
        keep(found, options.into, stem)
        print(f"{step.name}: {seen['outcome']}", flush=True)
    print(text_of(found))
    return status_of(found)


if __name__ == "__main__":
    sys.exit(main())
