"""Limits of another process that a test takes away for a while, and gives back."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

_OWN_MAPPINGS = 8 << 20
"""What an interpreter needs to go on under a limit of address space: a pool that is mapped is larger."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One of ``setrlimit(2)``, and how low it can go for a process that is running."""

    name: str
    number: int

    def take_away(self, pid: int) -> tuple[int, int]:
        """Leave ``pid`` next to nothing more than it has; return what :meth:`give_back` takes."""
        before = resource.prlimit(pid, self.number)
        least = _used(self.number, pid)
        resource.prlimit(pid, self.number, (least, before[1]))
        return before

    def give_back(self, pid: int, before: tuple[int, int]) -> None:
        resource.prlimit(pid, self.number, before)


def _used(number: int, pid: int) -> int:
    if number == resource.RLIMIT_NOFILE:
        return max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1
    if number == resource.RLIMIT_AS:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        return pages * resource.getpagesize() + _OWN_MAPPINGS
    if number == resource.RLIMIT_NPROC:
        return len(os.listdir(f"/proc/{pid}/task"))
    return 0


LIMITS = [
    Limit("descriptors", resource.RLIMIT_NOFILE),
    Limit("address space", resource.RLIMIT_AS),
    Limit("locked memory", resource.RLIMIT_MEMLOCK),
    Limit("file size", resource.RLIMIT_FSIZE),
]
"""A file that may not grow is to a writer what a full disk is, without a file system of its own."""
if os.geteuid() != 0:  # root may have any number of threads, whatever its limit says
    LIMITS.append(Limit("threads", resource.RLIMIT_NPROC))
