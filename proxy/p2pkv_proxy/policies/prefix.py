"""The one that was sent the longest beginning of this prompt before, unless it has too much to do.

What an instance really still has is not known here; ``cache_aware`` and ``predicted`` ask.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from p2pkv_proxy.policies.base import Choice, Policy, burden, lightest
from p2pkv_proxy.policies.beginnings import MOST_BLOCKS, Beginnings
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.tracked import Tracked

_OVERLOAD = 1.5
_SLACK_TOKENS = 2048
"""Tokens in flight by which an instance may be ahead of the lightest at any rate."""


class Prefix(Policy):
    """Remembers who was sent which beginnings."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._sent = Beginnings(most_blocks)

    def choose(self, prompt: Prompt, candidates: Sequence[Tracked]) -> Choice:
        light = lightest(candidates)
        now = time.monotonic()
        most = burden(light, now) * _OVERLOAD + _SLACK_TOKENS
        fit = {tracked.id: tracked for tracked in candidates if burden(tracked, now) <= most}
        lengths = self._sent.lengths(prompt.blocks(), fit)
        n_known = max(lengths.values(), default=0)
        holders = [tracked for tracked in fit.values() if lengths.get(tracked.id) == n_known]
        chosen = lightest(holders) if n_known else light
        self._sent.remember(prompt.blocks(), chosen.id)
        if not n_known:
            return Choice(chosen, "load", "nobody fit was sent this beginning")
        return Choice(chosen, "prefix", f"was sent {n_known} of {len(prompt.blocks())} blocks before")

    def forget(self, instance_id: str) -> None:
        self._sent.forget(instance_id)
