"""One run that says what was seen of device memory on this machine: the tests, the hunts, and how fast pages get there.

``make gpu-evidence`` runs it, on a real device or, without one, on the emulated driver, whose speed says nothing. All
parts together end within nine minutes, for machines that are lent by the minute; a part that did not get its time is
named as such. The files are made to be kept: ``docs/evidence/NAME.json`` for programs, ``NAME.txt`` for people.
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
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from device_buffers import KINDS, find_real
from fake_cuda import fake_cuda
from p2pkv import Node
from pair import Pair

ROOT = Path(__file__).parents[2]
BUDGET_S = 540.0
_PARTS = {
    "tests": (["-m", "not slow"], 240.0),
    "hunts into device memory, 50,000 hits over shm and tcp each": (["-m", "slow", "-k", "long_hunt"], 220.0),
}
"""What pytest is told beside the folder, and the most seconds that it may take."""
_CASES = ((64 << 10, 128), (256 << 10, 128), (1 << 20, 64))
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


def run_tests(arguments: Sequence[str], seconds: float, kind: str) -> dict[str, Any]:
    """Run the tests of this folder; return their numbers, and the names of those that failed."""
    if seconds <= 0:
        return {"outcome": "not run: no time was left"}
    with tempfile.TemporaryDirectory(prefix="p2pkv-evidence-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", *arguments, f"--junitxml={report}"]
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
    bad = [
        case
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {
        "outcome": "passed" if done.returncode == 0 else f"failed (exit status {done.returncode})",
        "seconds": round(time.monotonic() - began, 1),
        **counts,
        "failed": [f"{case.get('classname')}.{case.get('name')}" for case in bad],
    }


def measure(kind: str) -> list[dict[str, Any]]:
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
        "pages": n_pages,
        "page_nbytes": nbytes,
        "fetch_GB_s": round(median(fetches), 2),
        "pinned_copy_GB_s": round(median(copies), 2),
        "ratio": round(median(f / c for f, c in zip(fetches, copies, strict=True)), 3),
    }


def text_of(found: dict[str, Any]) -> str:
    """Write it for people."""
    lines = [f"Device memory: {found['device']}", f"commit {found['commit']}, {found['when']}", ""]
    lines += [f"{name}: {value}" for name, value in found["machine"].items()]
    for name, part in found["parts"].items():
        numbers = ", ".join(
            f"{part[key]} {key}" for key in ("tests", "failures", "errors", "skipped") if key in part
        )
        lines += [
            "",
            f"{name}: {part['outcome']}; {numbers} ({part.get('seconds', 0)} s)",
            *part.get("failed", []),
        ]
    lines += ["", "fetch over shm into device memory, beside a copy of page-locked memory of the same size:"]
    for row in found["speed"] if isinstance(found["speed"], list) else []:
        size = f"{row['pages']} x {row['page_nbytes'] >> 10} KiB"
        lines.append(
            f"{size:>16}: {row['fetch_GB_s']} GB/s, the copy {row['pinned_copy_GB_s']} GB/s, ratio {row['ratio']}"
        )
    if not isinstance(found["speed"], list):
        lines.append(str(found["speed"]))
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all parts; return 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "docs/evidence", help="folder of the files")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all parts together")
    options = parser.parse_args()
    until = time.monotonic() + options.budget
    kind, reason = find_real()
    kind = kind or "emulated"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found: dict[str, Any] = {
        "device": kind if kind != "emulated" else f"emulated driver ({reason}): speeds say nothing",
        "commit": commit.stdout.strip() or "unknown",
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": machine(),
        "parts": {},
    }
    try:
        found["speed"] = measure(kind)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other parts are to be run and kept
        found["speed"] = f"failed: {type(error).__name__}: {error}"
    for name, (arguments, seconds) in _PARTS.items():
        found["parts"][name] = run_tests(arguments, min(seconds, until - time.monotonic()), kind)
        print(f"{name}: {found['parts'][name]['outcome']}", flush=True)
    options.into.mkdir(parents=True, exist_ok=True)
    stem = (
        "emulated" if kind == "emulated" else found["machine"]["gpu"].split(",")[0].lower().replace(" ", "-")
    )
    (options.into / f"{stem}.json").write_text(json.dumps(found, indent=2) + "\n")
    (options.into / f"{stem}.txt").write_text(text_of(found))
    print(text_of(found))
    is_good = isinstance(found["speed"], list) and all(
        p["outcome"] == "passed" for p in found["parts"].values()
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
