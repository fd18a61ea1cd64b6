"""Forked children, which end in the middle of what their parents were doing."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

from patience import PATIENCE


def forked(in_child: Callable[[], None]) -> int:
    """Return the exit code of a child that does so and ends; it is ended by itself if it hangs for a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking with threads is warned of, and is the point here
        child = os.fork()
    if not child:
        try:
            signal.alarm(int(60 * PATIENCE))
            in_child()
        except SystemExit as ended:
            os._exit(int(ended.code or 0))
        except BaseException:  # noqa: BLE001  # nothing of the tests may go on in the child
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def leave(held: object) -> Callable[[], None]:
    """Return what a child does that ends within a ``with`` block of its parent's."""

    def leave() -> None:
        with held:  # type: ignore[attr-defined]
            raise SystemExit(7)

    return leave
