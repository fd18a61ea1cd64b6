"""File descriptors: whether there are enough of them for a node to start."""

from __future__ import annotations

import os
import resource

from p2pkv.errors import ConfigError

NEEDED = 64
"""What a node takes to start, generously: 26 with shm and tcp. Its peers cost two to eight each, later on."""


def require_descriptors() -> None:
    """Raise ConfigError if this process can't have :data:`NEEDED` more.

    Asked for ahead, because libraries below us end the process, or wait for ever, where they find none left.
    """
    taken: list[int] = []
    try:
        while len(taken) < NEEDED:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ConfigError(
            f"a node needs {NEEDED} file descriptors to start, and this process can have {len(taken)} more: "
            f"{error.strerror}; RLIMIT_NOFILE is {soft}, raise it (ulimit -n 65536)"
        ) from error
    finally:
        for descriptor in taken:
            os.close(descriptor)
