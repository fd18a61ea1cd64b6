"""How much memory this process may still take: what the machine has left, and what its control groups leave of that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from p2pkv.errors import ConfigError

_ROOT = Path("/")


class Available(NamedTuple):
    """Memory that is left, and who says so."""

    nbytes: int
    by: str


class _Files(NamedTuple):
    """Names of a group's files, and of numbers in its ``memory.stat``."""

    limit: str
    usage: str
    cache: str
    shared: str


_V2 = _Files("memory.max", "memory.current", "file", "shmem")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")


def available_memory(root: Path = _ROOT) -> Available | None:
    """Return the least of what the machine and the limits of this process's control groups leave.

    Page cache counts as left, since the kernel gives it up; swap is left too. None where the kernel says nothing.
    ``root`` is where ``proc`` and ``sys`` are mounted. Blocks for some reads of those.
    """
    return min(_all_of(root), default=None, key=lambda left: left.nbytes)


def require_memory(nbytes: int, available: Available | None) -> None:
    """Raise :class:`~p2pkv.errors.ConfigError` if ``nbytes`` are not there: the process would be killed."""
    if available is not None and nbytes > available.nbytes:
        raise ConfigError(
            f"pool_size, buffer_size and buddy_pool_size together take {_gib(nbytes)}, and {available.by} leaves "
            f"{_gib(available.nbytes)}; lower them, or give more"
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):,.2f} GiB"


def _all_of(root: Path) -> Iterator[Available]:
    machine = _numbers(root / "proc/meminfo")
    if "MemAvailable" in machine:
        nbytes = (machine["MemAvailable"] + machine.get("SwapFree", 0)) * 1024
        yield Available(nbytes, "the machine")
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits(root / "sys/fs/cgroup", path, _V2)
        elif "memory" in controllers.split(","):
            yield from _limits(root / "sys/fs/cgroup/memory", path, _V1)


def _limits(mount: Path, path: str, files: _Files) -> Iterator[Available]:
    """Yield what a control group and those above it leave; in a container its own is what is mounted."""
    own = PurePosixPath(path.lstrip("/"))
    for name in (own, *own.parents):
        group = mount / name
        try:
            most = int((group / files.limit).read_text())
            used = int((group / files.usage).read_text())
        except (OSError, ValueError):  # a group that is not shown here, or one without a limit ("max")
            continue
        stat = _numbers(group / "memory.stat")
        cache = stat.get(files.cache, 0) - stat.get(
            files.shared, 0
        )  # shared memory counts as cache, and stays
        yield Available(
            max(0, most - used + max(0, cache)), f"the limit of control group {PurePosixPath('/') / name}"
        )


def _numbers(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = [line.replace(":", " ").split() for line in lines]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}
