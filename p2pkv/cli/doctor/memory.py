"""Whether the memory that a node takes is there: what the kernel has, and what the container may have."""

from __future__ import annotations

from pathlib import Path

from p2pkv.cli.doctor.finding import Finding, Verdict, size
from p2pkv.config import Config
from p2pkv.memory.available import available_memory


def examine_memory(config: Config, root: Path = Path("/")) -> Finding:
    """Compare all that a node of ``config`` takes with what is available on the system at ``root``."""
    parts = {
        "pool_size": config.pool_nbytes,
        "buffer_size": config.buffer_nbytes,
        "buddy_pool_size": config.buddy_pool_nbytes,
        "device_staging_size": config.device_staging_nbytes,
    }
    needed = sum(parts.values())
    available = available_memory(root)
    too_much = available is not None and needed > available.nbytes
    left = "unknown how much" if available is None else f"{available.by} leaves {size(available.nbytes)}"
    taken = " + ".join(f"{name} {size(nbytes)}" for name, nbytes in parts.items() if nbytes)
    return Finding(
        Verdict.BAD if too_much else Verdict.GOOD,
        "memory",
        f"{left}, a node takes {size(needed)} ({taken})",
        f"lower {max(parts, key=lambda name: parts[name])}: a node that takes more does not start"
        if too_much
        else "",
    )
