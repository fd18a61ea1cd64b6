"""How much memory this process may lock, which devices need for what is registered with them."""

from __future__ import annotations

import resource
from pathlib import Path

CAP_IPC_LOCK = 14
"""The number of the capability that lets a process lock memory without limit."""


def locked_memory_limit() -> int | None:
    """Return how many bytes this process may lock, or None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> CAP_IPC_LOCK & 1:
            return None
    return soft
