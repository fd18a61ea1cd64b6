"""A model that takes its time and computes nothing, so that a few cores carry many engines, each as fast as is said."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from demo.model import PAGE, PRINTABLE, Floats, Model, Shape
from demo.paged_kv import PagedKV

_MADE_UP_S = 0.02
"""So much of what a page took too long is taken off the next ones: a busy machine wakes sleepers late."""


class WaitingModel(Model):
    """Takes ``page_seconds`` for each page, whoever else has the processor; all that it says is the same token."""

    def __init__(
        self,
        shape: Shape,
        page_seconds: float,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(shape)
        self._page_seconds = page_seconds
        self._now = now
        self._sleep = sleep
        self._due = 0.0
        self._hidden: Floats = np.zeros((PAGE, shape.width), np.float32)

    def run_page(self, tokens: Sequence[int], pages: Sequence[int], kv: PagedKV) -> Floats:
        now = self._now()
        self._due = max(self._due, now - _MADE_UP_S) + self._page_seconds
        if self._due > now:
            self._sleep(self._due - now)
        kv.k[pages[-1]] = kv.v[pages[-1]] = 0.0
        return self._hidden

    def next_token(self, hidden: Floats) -> int:
        return PRINTABLE[0]
