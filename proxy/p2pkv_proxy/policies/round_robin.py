"""One after the other."""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv_proxy.policies.base import Choice, Policy
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.tracked import Tracked


class RoundRobin(Policy):
    """Goes on behind the last one chosen, so that one who comes or goes shifts nobody's turn."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, prompt: Prompt, candidates: Sequence[Tracked]) -> Choice:
        chosen = next((tracked for tracked in candidates if tracked.id > self._last), candidates[0])
        self._last = chosen.id
        return Choice(chosen, "turn")
