"""Large bodies: so many bytes of them at once, and one after another understood in a thread beside the loop.

Without bounds a few clients would take the router's memory, and on the loop everybody's time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE = 1 << 20
"""Bytes from which on a body is large."""
_MOST = 64 << 20
"""Four of the largest ones that may be."""


class LargeBodies:
    """What requests hold of them, in bytes of theirs as they came. One event loop uses it."""

    def __init__(self, most: int = _MOST, large: int = LARGE) -> None:
        """``most``: bytes of all; a single one may have more."""
        self._most = most
        self.large = large
        self.nbytes = 0
        """Held now."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._reader = ThreadPoolExecutor(1, "p2pkv-large-bodies")
        """It has a thread from the first large body on, until :meth:`close`."""

    def hold(self) -> Hold:
        """Return what a request is to hold, and must release."""
        return Hold(self)

    async def in_turn(self, nbytes: int, work: Callable[[], T]) -> T:
        """Do what a body of so many bytes asks for: a large one's in the thread, when it is its turn there."""
        if nbytes <= self.large:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

    def close(self) -> None:
        """End the thread, and do nothing of what waits for it."""
        self._reader.shutdown(cancel_futures=True)

    async def take(self, nbytes: int) -> None:
        """Wait until there is room, behind those who wait already."""
        if not self._waiting and self._has_room(nbytes):
            self.nbytes += nbytes
            return
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, room))
        try:
            await room
        except asyncio.CancelledError:
            if not room.cancelled():  # it was let in, and has not heard of it
                self.give_back(nbytes)
            self._let_in()
            raise

    def give_back(self, nbytes: int) -> None:
        """Make room for others."""
        self.nbytes -= nbytes
        self._let_in()

    def _has_room(self, nbytes: int) -> bool:
        return self.nbytes == 0 or self.nbytes + nbytes <= self._most

    def _let_in(self) -> None:
        while self._waiting:
            nbytes, room = self._waiting[0]
            if not room.cancelled():
                if not self._has_room(nbytes):
                    return
                self.nbytes += nbytes
                room.set_result(None)
            self._waiting.popleft()


class Hold:
    """What one request holds."""

    def __init__(self, bodies: LargeBodies) -> None:
        self._bodies = bodies
        self._nbytes = 0
        self.is_waiting = False

    def is_enough(self, nbytes: int) -> bool:
        """Whether a body may have so many bytes without holding more."""
        return nbytes <= max(self._nbytes, self._bodies.large)

    async def take(self, nbytes: int) -> None:
        """Hold so many in all; wait until there is room."""
        more = nbytes - self._nbytes
        self.is_waiting = True
        await self._bodies.take(more)
        self.is_waiting = False
        self._nbytes += more

    def release(self) -> None:
        """Let go of it. Idempotent."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self._bodies.give_back(nbytes)
