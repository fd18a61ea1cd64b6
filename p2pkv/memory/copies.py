"""How page bytes are copied: by which kernel, the one that a setting names or what is fastest here, and by whom.

The choice holds for the process, since CPU and memory are what decides; the node that started last has made it. It is
measured once in a process, in about 20 ms, and not kept beyond: so little is not worth a file that may be of another
machine, or of a busy moment.

Large batches are shared with a second thread of the process while that makes them faster, which they tell themselves.
"""

from __future__ import annotations

from typing import NamedTuple

from p2pkv import _native
from p2pkv.errors import ConfigError

AUTO = "auto"


class CopyChoice(NamedTuple):
    """What copies the bytes of one size class."""

    operation: str
    """``copy``, or ``copy_and_sum`` where the checksum is folded in, as publishing does."""
    size_class: str
    """Of one copy, such as ``16 to 256 KiB``. Below 4 KiB memcpy copies, whatever is chosen."""
    kernel: str
    of_memcpy: float
    """How fast it was when it was measured, memcpy's speed being 1; 0 if it was not."""


def choose(setting: str, pool: _native.Pool | None) -> None:
    """Copy with the kernel that ``copy_kernel`` names, or measure on the memory of ``pool``, which has no pages yet.

    Raises :class:`~p2pkv.errors.ConfigError` for a kernel that this CPU does not have.
    """
    if setting == AUTO:
        _native.use_fastest_copy_kernels(pool)
    elif not _native.use_copy_kernel(setting):
        known = ", ".join((AUTO, *_native.copy_kernels()))
        raise ConfigError(f"copy_kernel is {setting!r}, which is not for this CPU; it has {known}")


def choices() -> list[CopyChoice]:
    """Return what is in force in this process."""
    return [CopyChoice(*choice) for choice in _native.copy_choices()]


def metrics() -> dict[str, dict[tuple[str, ...], float]]:
    """Return, by metric and labels, what is in force and how many large batches how many threads have copied."""
    alone, shared = _native.large_copies()
    return {
        "p2pkv_copy_kernel_info": {
            (choice.operation, choice.size_class, choice.kernel): 1.0 for choice in choices()
        },
        "p2pkv_large_copies_total": {("1",): float(alone), ("2",): float(shared)},
    }


def hire(n_threads: int) -> _native.CopyTeam | None:
    """Have large batches copied by ``n_threads`` threads at most, 1 or 2, until all that this returned are closed.

    None for 1. The second thread is one for the whole process, and only for those of its batches in which no other
    caller's have it; a process that may run on one core only has none.
    """
    return _native.CopyTeam() if n_threads > 1 else None
