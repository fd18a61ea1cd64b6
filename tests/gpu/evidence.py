"""One run that says what was seen of device memory on this machine: the tests, the hunts, NCCL, and how fast bytes go.

``make gpu-evidence`` runs it, on a real device or, without one, on the emulated driver, whose speed says nothing. All
steps together end within nine minutes, for machines that are lent by the minute. They are in order of worth, each has a
limit, and after each the files are written anew: a run that is cut short leaves what it has seen, and names what it has
not. ``--plan`` tells the order, and what is left out when all is as slow as it may be. The files are made to be kept:
``docs/evidence/NAME.json`` for programs, ``NAME.txt`` for people.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from cluster import Cluster
from device_buffers import KINDS, find_real
from fake_cuda import fake_cuda
from p2pkv import Node
from pair import Pair

ROOT = Path(__file__).parents[2]
BUDGET_S = 540.0
_NO_TIME = "not run: no time was left"
_NCCL = "tests/gpu/test_nccl_between_processes.py"
_CASES = ((64 << 10, 128), (256 << 10, 128), (1 << 20, 64))
_ROWS = ((64 << 10, 512), (1 << 20, 128), (8 << 20, 32))
_ROUNDS = 7
_LIBRARIES = (
    "p2pkv",
    "numpy",
    "torch",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    most: float
    """The most seconds that it may take."""
    run: Callable[[float, str], dict[str, Any]]
    """``(seconds, kind)`` to what was seen, which has an ``outcome``."""


def steps() -> list[Step]:
    """Return all steps, in order of worth."""
    return [
        Step("what this machine can do", 30.0, run_doctor),
        Step("tests", 170.0, tests("tests/gpu", "-m", "not slow", "--ignore", _NCCL)),
        Step("pages into device memory", 50.0, figures("pages")),
        Step("rows from device to device", 50.0, figures("rows")),
        Step("NCCL between two processes", 120.0, tests(_NCCL)),
        Step(
            "hunts into device memory, 50,000 hits over shm and tcp each",
            220.0,
            tests("tests/gpu", "-m", "slow", "-k", "long_hunt"),
        ),
    ]


def plan(budget: float) -> str:
    """Say in which order the steps come, and which have no time left where all before took the most they may."""
    lines, left = [], budget
    for step in steps():
        if left <= 0:
            says = "left out if all before it take as long as they may"
        elif left < step.most:
            says = f"{left:.0f} s of {step.most:.0f} if all before it take as long as they may"
        else:
            says = f"{step.most:.0f} s at most"
        left -= step.most
        lines.append(f"{step.name}: {says}")
    return "\n".join(lines)


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


def tests(*arguments: str) -> Callable[[float, str], dict[str, Any]]:
    return lambda seconds, kind: run_tests(arguments, seconds, kind)


def run_tests(arguments: Sequence[str], seconds: float, kind: str) -> dict[str, Any]:
    """Run some tests; return their numbers, and the names of those that failed."""
    if seconds <= 0:
        return {"outcome": _NO_TIME}
    with tempfile.TemporaryDirectory(prefix="p2pkv-evidence-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *arguments, f"--junitxml={report}"]
        wants_real = {"P2PKV_TEST_GPU": "0" if kind == "emulated" else "1"}
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | wants_real, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return {"outcome": f"not finished in {seconds:.0f} s", "seconds": round(seconds, 1)}
        suite = ET.parse(report).getroot().find("testsuite")  # noqa: S314 - pytest has just written it
    assert suite is not None
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    cases = list(suite.iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    reasons = {skip.get("message", "") for case in cases for skip in case.iter("skipped")}
    return {
        "outcome": "passed" if done.returncode == 0 else f"failed (exit status {done.returncode})",
        "seconds": round(time.monotonic() - began, 1),
        **counts,
        "failed": [f"{case.get('classname')}.{case.get('name')}" for case in bad],
        "skipped because": sorted(reasons),
    }


def run_doctor(seconds: float, kind: str) -> dict[str, Any]:
    """Keep what ``p2pkv doctor`` says."""
    settings = {"P2PKV_CUDA_LIBRARY": fake_cuda().path} if kind == "emulated" else {}
    command = [sys.executable, "-m", "p2pkv", "doctor"]
    return _told(command, seconds, settings, lambda text: {"outcome": "told", "says": text.splitlines()})


def figures(what: str) -> Callable[[float, str], dict[str, Any]]:
    """Measure in a process of its own, which can be given up."""
    command = [sys.executable, "-m", "gpu.evidence", "--measure", what]
    return lambda seconds, kind: _told(
        [*command, "--kind", kind],
        seconds,
        {},
        lambda text: {"outcome": "passed", "figures": json.loads(text.splitlines()[-1])},
    )


def _told(
    command: list[str],
    seconds: float,
    environ: Mapping[str, str],
    read: Callable[[str], dict[str, Any]],
) -> dict[str, Any]:
    if seconds <= 0:
        return {"outcome": _NO_TIME}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environ,
            timeout=seconds,
            capture_output=True,
            text=True,
            check=False,
        )
        told = read(done.stdout)
    except subprocess.TimeoutExpired:
        return {"outcome": f"not finished in {seconds:.0f} s", "seconds": round(seconds, 1)}
    except (ValueError, IndexError):
        last = done.stderr.strip().splitlines()[-1:] or ["nothing was said"]
        return {"outcome": f"failed (exit status {done.returncode})", "failed": last}
    return told | {"seconds": round(time.monotonic() - began, 1)}


def measure_pages(kind: str) -> list[dict[str, Any]]:
    """Fetch pages over shm into device memory, beside a copy of as many page-locked bytes, in turns."""
    settings = {"cuda_library": fake_cuda().path} if kind == "emulated" else {}
    rows = []
    for nbytes, n_pages in _CASES:
        with tempfile.TemporaryDirectory(prefix="p2pkv-evidence-") as folder:
            # of room for the pages, and staging for two rounds of them
            pair = Pair(Path(folder), transports=["shm"], pool_size=2 * nbytes * n_pages, **settings)
            buffer = KINDS[kind](nbytes * n_pages)
            try:
                rows.append(_case(pair.owner, pair.reader, buffer, n_pages, nbytes))
            finally:
                pair.close()
                buffer.close()
    return rows


def _case(owner: Node, reader: Node, buffer: Any, n_pages: int, nbytes: int) -> dict[str, Any]:
    source = np.random.default_rng(1).integers(0, 256, (n_pages, nbytes), np.uint8)
    owner.register_memory(source)
    reader.register_memory(buffer.array)
    keys = [f"{nbytes}-{i}" for i in range(n_pages)]
    assert owner.publish(keys, source, timeout=30.0).all()
    copy = buffer.copier(n_pages * nbytes)
    fetches, copies = [], []
    for i in range(_ROUNDS + 1):
        began = time.monotonic()
        outcomes = reader.fetch(keys, buffer.rows(n_pages, nbytes), timeout=30.0)
        fetched = time.monotonic()
        assert outcomes.all(), "a page was missed"
        if i == 0:
            assert np.array_equal(buffer.read().reshape(n_pages, nbytes), source), "wrong bytes"
        before = time.monotonic()
        copy()
        if i > 0:  # the first ones warm up
            fetches.append(n_pages * nbytes / (fetched - began) / 1e9)
            copies.append(n_pages * nbytes / (time.monotonic() - before) / 1e9)
    return {
        "n": n_pages,
        "nbytes": nbytes,
        "what": "fetched over shm, beside a copy of page-locked memory",
        "GB_s": round(median(fetches), 2),
        "copy_GB_s": round(median(copies), 2),
        "ratio": round(median(f / c for f, c in zip(fetches, copies, strict=True)), 3),
    }


def measure_rows(kind: str) -> list[dict[str, Any]]:
    """Put rows of one process's device memory into another's, beside a copy within the device."""
    rows = []
    # as other processes map what cudaMalloc gives: by a handle
    settings: dict[str, Any] = {"cuda_library": fake_cuda().path} if kind == "emulated" else {}
    memory = max(n * nbytes for nbytes, n in _ROWS)
    for transports in (["shm"], ["cuda_ipc", "shm"]):
        with Cluster(
            transports=transports, device_staging_size="64MiB", buffer_size=0, **settings
        ) as cluster:
            options: dict[str, Any] = {"device": kind, "memory": memory, "in_memfd": True}
            producer = cluster.start("producer", readable=True, **options)
            consumer = cluster.start("consumer", **options)
            cluster.meet(producer, consumer)
            for nbytes, n in _ROWS:
                sizes: dict[str, Any] = {"n": n, "nbytes": nbytes, "rounds": _ROUNDS + 1}
                for i in range(_ROUNDS + 1):
                    grant: dict[str, Any] = {"request": f"round {i}", "timeout": 60.0}
                    consumer.call("grant", n=n, nbytes=nbytes, **grant)
                puts = producer.call("put_times", to="consumer", patience=60.0, **sizes)[1:]
                copies = producer.call("copy_times", patience=60.0, **sizes)[1:]
                found = consumer.call("wait", request="round 0", timeout=10.0, seed=1, nbytes=nbytes)
                assert found["statuses"] == ["OK"], found
                assert found["wrong"] == 0, found
                direct = consumer.call("counters")["p2pkv_direct_bytes_total"]
                rows.append(
                    {
                        "n": n,
                        "nbytes": nbytes,
                        "what": f"put over {transports[0]}, beside a copy within the device",
                        "GB_s": round(median(n * nbytes / s / 1e9 for s in puts), 2),
                        "copy_GB_s": round(median(n * nbytes / s / 1e9 for s in copies), 2),
                        "ratio": round(median(copies) / median(puts), 3),
                        "went_directly": direct > 0,
                    }
                )
    return rows


MEASURES: Mapping[str, Callable[[str], list[dict[str, Any]]]] = {"pages": measure_pages, "rows": measure_rows}


def text_of(found: dict[str, Any]) -> str:
    """Write it for people."""
    lines = [f"Device memory: {found['device']}", f"commit {found['commit']}, {found['when']}", ""]
    lines += [f"{name}: {value}" for name, value in found["machine"].items()]
    for name, part in found["parts"].items():
        numbers = [f"{part[key]} {key}" for key in ("tests", "failures", "errors", "skipped") if key in part]
        lines += ["", f"{name}: " + "; ".join([part["outcome"], *([", ".join(numbers)] if numbers else [])])]
        lines[-1] += f" ({part.get('seconds', 0)} s)"
        lines += [f"  {line}" for line in part.get("failed", [])]
        lines += [f"  skipped: {reason}" for reason in part.get("skipped because", [])]
        lines += [f"  {line}" for line in part.get("says", [])]
        for row in part.get("figures", []):
            speeds = f"{row['GB_s']} GB/s, the copy {row['copy_GB_s']} GB/s, ratio {row['ratio']}"
            lines.append(f"  {row['n']} x {row['nbytes'] >> 10} KiB {row['what']}: {speeds}")
    return "\n".join(lines) + "\n"


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


def begin(kind: str, reason: str) -> tuple[dict[str, Any], str]:
    """Return what is known before the first step, and the files' name."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found: dict[str, Any] = {
        "device": kind if kind != "emulated" else f"emulated driver ({reason}): speeds say nothing",
        "commit": commit.stdout.strip() or "unknown",
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": machine(),
        "parts": {step.name: {"outcome": "not run: the run was cut before it"} for step in steps()},
    }
    gpu = found["machine"]["gpu"].split(",")[0].lower().replace(" ", "-")
    return found, "emulated" if kind == "emulated" else gpu


def main() -> int:
    """Run all steps; return 0 if each passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "docs/evidence", help="folder of the files")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all steps together")
    parser.add_argument("--plan", action="store_true", help="tell the order of the steps, and run none")
    parser.add_argument("--measure", choices=list(MEASURES), help="only print these figures")
    parser.add_argument(
        "--kind", default="emulated", choices=list(KINDS), help="of device memory, to measure with"
    )
    options = parser.parse_args()
    if options.plan:
        print(plan(options.budget))
        return 0
    if options.measure:
        print(json.dumps(MEASURES[options.measure](options.kind)))
        return 0
    until = time.monotonic() + options.budget
    real, reason = find_real()
    kind = real or "emulated"
    found, stem = begin(kind, reason)
    for step in steps():
        found["parts"][step.name] = step.run(min(step.most, until - time.monotonic()), kind)
        keep(found, options.into, stem)
        print(f"{step.name}: {found['parts'][step.name]['outcome']}", flush=True)
    print(text_of(found))
    return 0 if all(part["outcome"] in ("passed", "told") for part in found["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
