"""What makes a process of pages and secrets one that others of its user can't look into."""

from __future__ import annotations

import ctypes
import os

_PR_SET_DUMPABLE = 4


def become_untraceable() -> None:
    """Let nobody but root trace this process, open its memory or descriptors through ``/proc``, or have it dumped.

    It holds until the process executes another program; whoever forks from it inherits it. See ``prctl(2)``,
    ``PR_SET_DUMPABLE``. Raises :class:`OSError` where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"this process can't be closed to others of its user: {os.strerror(number)}")
