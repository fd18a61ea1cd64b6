"""What is kept of a node's pool between two lives of the node, and who keeps it.

A pool that outlives its process is two memfds: the region that peers read, and a record of each page. Somebody has to
hold their descriptors while no node does; he maps nothing, and understands nothing of what is in them.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import NamedTuple

from p2pkv.transports.base import Resource


class PoolMemory(NamedTuple):
    """The descriptors of a pool's memory, which are whoever's has this."""

    region: int
    records: int

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return os.fstat(self.region).st_size

    def close(self) -> None:
        """Close both."""
        for fd in self:
            os.close(fd)


class Keeper(Resource):
    """Keeps the memory of one node's pool. Raises :class:`~p2pkv.errors.ConfigError` where it can't be reached."""

    @property
    @abstractmethod
    def is_keeping(self) -> bool:
        """Whether the memory would be there if this process ended now, as far as is known."""

    @abstractmethod
    def take(self) -> PoolMemory | None:
        """Return what a process of before has left, which stays kept; None if there is nothing."""

    @abstractmethod
    def keep(self, memory: PoolMemory) -> None:
        """Keep this instead of what was kept; the descriptors stay the caller's."""

    @abstractmethod
    def drop(self) -> None:
        """Keep nothing any more: the memory goes with the last process that maps it."""
