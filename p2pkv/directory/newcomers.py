"""Which members are so new that their part of the directory may not have reached them yet.

A node that joins takes entries over from others, and owners of pages put them there again. Where that takes an owner
long (its interpreter is busy, it has millions of pages), and every replica of an entry has gone to newcomers, a reader
that asks them alone misses pages that are there. The ring without the newcomers says who had those entries before, and
still has them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from p2pkv.directory.view import Member

SETTLING_S = 3.0
"""For how long a member is new: as long as a busy owner may take to put entries again."""


class Newcomers:
    """Remembers when this node first saw each member on the ring. Not thread-safe."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}

    def settled(self, members: Iterable[Member]) -> list[Member]:
        """Return those of ``members``, all that are present now, which are not new.

        New is who started less than :data:`SETTLING_S` ago by its boot epoch, and was seen here for no longer: a node
        that has just come itself sees everybody for the first time, and a clock that is wrong makes nobody new for
        ever.
        """
        now, wall_ns = time.monotonic(), time.time_ns()
        present = list(members)
        self._since = {
            (member.node_id, member.boot_epoch): self._since.get((member.node_id, member.boot_epoch), now)
            for member in present
        }
        started_before = wall_ns - int(SETTLING_S * 1e9)
        return [
            member
            for member in present
            if member.boot_epoch < started_before
            or now - self._since[member.node_id, member.boot_epoch] > SETTLING_S
        ]
