"""The one that is predicted to give the first token soonest.

Its queue, what it would have to compute at its own rate, and what it would have to fetch, by where that lies: all in
seconds, learnt from the prompts before (:mod:`p2pkv_proxy.costs`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from p2pkv_proxy.costs import OWN, Work, work_of
from p2pkv_proxy.policies.base import Choice, Policy
from p2pkv_proxy.policies.beginnings import Beginnings
from p2pkv_proxy.policies.even_work import EvenWork
from p2pkv_proxy.prompts import BLOCK_TOKENS, Prompt
from p2pkv_proxy.tracked import Tracked

_NEAR_S = 0.0001
"""Predictions this near to the best are as good: one of these is drawn, so that routers don't all take the same."""


class Predicted(Policy):
    """Where the directory can't say who holds what, those who were sent a beginning before are taken to have it."""

    wants_holdings: ClassVar[bool] = True

    def __init__(self, now: Callable[[], float] = time.monotonic, *, seed: int | None = None) -> None:
        """``seed``: draw the same each time."""
        self._now = now
        self._sent = Beginnings()
        self._even = EvenWork()
        self._random = random.Random(seed)  # noqa: S311 - no secret

    def choose(self, prompt: Prompt, candidates: Sequence[Tracked]) -> Choice:
        blocks = prompt.blocks()
        lengths = self._sent.lengths(blocks, {tracked.id for tracked in candidates})
        prompt.sent = {name: n_blocks * BLOCK_TOKENS for name, n_blocks in lengths.items()}
        now = self._now()
        # A prompt that shares nothing follows no pages, and what it takes is all there is to go by.
        shared = min(1.0, max(prompt.sent.values(), default=0) / max(1, prompt.n_tokens))
        uneven = self._even.seconds(tracked.id for tracked in candidates)
        seconds = [
            self._seconds(prompt, tracked, now) + shared * uneven[tracked.id] for tracked in candidates
        ]
        near = min(seconds) + _NEAR_S
        chosen = self._random.choice(
            [tracked for tracked, took in zip(candidates, seconds, strict=True) if took <= near]
        )
        self._sent.remember(blocks, chosen.id)
        work = work_of(prompt, chosen.id, chosen.instance.node_id)
        own = chosen.costs.seconds(chosen.id, work)
        self._even.note(chosen.id, work.n_compute, own, now)
        return self._told(prompt, chosen, work, own, now)

    def forget(self, instance_id: str) -> None:
        self._sent.forget(instance_id)
        self._even.forget(instance_id)

    @staticmethod
    def _seconds(prompt: Prompt, tracked: Tracked, now: float) -> float:
        work = work_of(prompt, tracked.id, tracked.instance.node_id)
        penalty = tracked.penalty(now) * tracked.costs.compute(tracked.id)
        return tracked.queued(now) + tracked.costs.seconds(tracked.id, work) + penalty

    @staticmethod
    def _told(prompt: Prompt, chosen: Tracked, work: Work, own: float, now: float) -> Choice:
        """Say what it takes there; ``own`` are the seconds of the work by itself."""
        queued = chosen.queued(now)
        own_tokens = work.fetched.pop(OWN, 0)
        detail = (
            f"first token in {queued + own:.3f} s: {queued:.3f} s queued, {work.n_compute:.0f} tokens to compute, "
            f"{sum(work.fetched.values()):.0f} to fetch, {own_tokens:.0f} there"
        )
        if prompt.holdings is None:
            return Choice(chosen, "guessed", f"{prompt.holdings_flaw}; {detail}")
        return Choice(chosen, "soonest", detail)
