"""The one with the fewest tokens in flight."""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv_proxy.policies.base import Choice, Policy, lightest
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.tracked import Tracked


class LeastLoaded(Policy):
    """Counts tokens, not requests: one long prompt weighs as much as many short ones."""

    def choose(self, prompt: Prompt, candidates: Sequence[Tracked]) -> Choice:
        chosen = lightest(candidates)
        return Choice(chosen, "load", f"{chosen.weight:.0f} tokens in flight")
