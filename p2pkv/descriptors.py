"""File descriptors: as many as the system allows, and whether they are enough for a node to start."""

from __future__ import annotations

import errno
import logging
import os
import resource

from p2pkv.errors import ConfigError

_log = logging.getLogger(__name__)

NEEDED = 64
"""What a node takes to start, generously: 29 with what `auto` chooses on any machine. Its peers cost two to eight each,
later on."""
LACKING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What ``accept`` fails with for as long as the process, or the system, is short."""
NOBODY_IN_S = 0.1
"""How long a server lets nobody in after that: who waits at the door would keep it awake."""


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


def raise_limit() -> None:
    """Raise this process's soft limit of descriptors to the hard one; nothing if that is not allowed.

    Peers cost descriptors, and the usual soft limit of 1,024 is there for programs that call select(2): a cluster of a
    hundred nodes is over it, and a node that is short of descriptors has misses only.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        _log.info("descriptors stay limited to %d, RLIMIT_NOFILE can't be raised: %s", soft, error)
        return
    _log.info("raised the limit of descriptors, RLIMIT_NOFILE, from %d to %d", soft, hard)
