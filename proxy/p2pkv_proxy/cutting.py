"""Ending a request's waits from outside: its deadline, its client leaving, the loss of an instance it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum


class Cut(Enum):
    """Why a request's wait was ended from outside."""

    DEADLINE = "deadline"
    CLIENT_GONE = "client gone"
    CLIENT_SLOW = "client slow"
    INSTANCE_LOST = "instance lost"
    ROUTER_ENDS = "router ends"


class CutError(Exception):
    """A wait was ended from outside."""

    def __init__(self, why: Cut) -> None:
        super().__init__(why.value)
        self.why = why


class Waits:
    """What one request waits for. Its task is the only one that waits; anybody on the loop may cut."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._why: Cut | None = None
        self.deadline = float("inf")
        """When what is waited for is cut off, by whoever keeps the time."""

    def cut(self, why: Cut) -> None:
        """End what the request waits for, once. The loss of an instance gives way to what ends all attempts."""
        is_first = self._why is None
        if is_first or self._why is Cut.INSTANCE_LOST:
            self._why = why
        if is_first and self._task is not None:
            self._task.cancel()

    def forget_losses(self) -> None:
        """Begin another attempt: that an instance of the one before was lost came when that had failed already."""
        if self._why is Cut.INSTANCE_LOST:
            self._why = None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let :meth:`cut` end waits of the block; it ends with :class:`CutError` then."""
        if (why := self._take()) is not None:
            raise CutError(why)
        self._task = task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if (why := self._take()) is None:
                raise
            _uncancel(task)
            raise CutError(why) from None
        finally:
            self._task = None

    def _take(self) -> Cut | None:
        why, self._why = self._why, None
        return why


def _uncancel(task: asyncio.Task[object] | None) -> None:
    """Tell the task that its cancellation is dealt with; before Python 3.11 nobody kept count."""
    uncancel = getattr(task, "uncancel", None)
    if uncancel is not None:
        uncancel()
