"""Whether a process is back at its level: descriptors, threads, mapped segments."""

from __future__ import annotations

import os
import time
from pathlib import Path

from footprint import Footprint
from hunts.frame import Broken

_SETTLING_S = 10.0
"""How long threads and descriptors may take to go once their owner has closed; a guess that is generous on purpose."""


class Levels:
    """The highest footprint after the first schedules, and the check that later ones come back to it.

    What a library opens once and keeps (a name server's socket, an engine's threads) is there after the first two.
    """

    def __init__(self, warm_up: int = 2) -> None:
        self._warm_up = warm_up
        self._level: Footprint | None = None

    def check(self) -> None:
        """Take the level during the first schedules; afterwards raise `Broken` if something has stayed."""
        if self._warm_up > 0:
            self._warm_up -= 1
            self._level = Footprint.of(os.getpid())
            return
        assert self._level is not None
        until = time.monotonic() + _SETTLING_S
        while (grown := self._grown(Footprint.of(os.getpid()))) and time.monotonic() < until:
            time.sleep(0.01)  # looked at again, until it has gone or the time is up
        if grown:
            raise Broken(f"resources did not come back: {grown}; open now: {', '.join(_open())}")

    def _grown(self, now: Footprint) -> str:
        assert self._level is not None
        pairs = [
            ("descriptors", self._level.n_fds, now.n_fds),
            ("threads", self._level.n_threads, now.n_threads),
            ("mapped segments", self._level.n_segments, now.n_segments),
        ]
        return ", ".join(f"{after} {what} for {before}" for what, before, after in pairs if after > before)


def _open() -> list[str]:
    """Return what this process has open and which threads it has, for the one who looks for the leak."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(fd))
        except FileNotFoundError:
            continue  # the listing's own descriptor
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sorted(found) + sorted(threads)
