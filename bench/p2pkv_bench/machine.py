"""On what machine figures were taken: they say nothing without it."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> dict[str, object]:
    """Return the processor, its cores, the memory and the kernel."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal") or "unknown",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def _field(file: str, name: str) -> str:
    try:
        for line in Path(file).read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux, or no /proc: the caller has another answer
    return ""
