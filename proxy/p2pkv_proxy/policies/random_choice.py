"""Any of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from p2pkv_proxy.policies.base import Choice, Policy
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.tracked import Tracked


class RandomChoice(Policy):
    """Evenly; several routers need not know of each other."""

    def __init__(self) -> None:
        self._random = random.Random()  # noqa: S311 - no secret

    def choose(self, prompt: Prompt, candidates: Sequence[Tracked]) -> Choice:
        return Choice(self._random.choice(candidates), "drawn")
