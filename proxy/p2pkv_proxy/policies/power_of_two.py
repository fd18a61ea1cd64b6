"""The lighter of two that were drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence

from p2pkv_proxy.policies.base import Choice, Policy, lightest
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.tracked import Tracked


class PowerOfTwo(Policy):
    """Nearly as even as the lightest of all; routers that know little of each other do not all choose the same."""

    def __init__(self) -> None:
        self._random = random.Random()  # noqa: S311 - no secret

    def choose(self, prompt: Prompt, candidates: Sequence[Tracked]) -> Choice:
        drawn = self._random.sample(candidates, min(2, len(candidates)))
        chosen = lightest(sorted(drawn, key=lambda tracked: tracked.id))
        return Choice(
            chosen, "load", f"{chosen.weight:.0f} tokens in flight, the lighter of {len(drawn)} drawn"
        )
