"""Computing evenly: pages stay where they were computed, and a pool that gets more than others loses them sooner.

Whoever goes by what is there already sends more to who has most. That one's pool then gives pages up that are still
wanted, while others have room: prompts of a whole session are computed again. Seen with agents whose pages just fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

_MEMORY_S = 60.0
"""What was sent longer ago counts less. Guess: within it an agent comes back."""
_STEP = 0.05
"""How much one prompt counts in what a prompt takes."""


class EvenWork:
    """What each instance was sent of late, in tokens to compute. One event loop uses it."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._at = 0.0
        self._typical_s = 0.0

    def seconds(self, names: Iterable[str]) -> dict[str, float]:
        """Return what one more costs at each: as long as a prompt takes, at who has twice the mean."""
        tokens = {name: self._tokens.get(name, 0.0) for name in names}
        mean = sum(tokens.values()) / len(tokens)
        if not mean:
            return dict.fromkeys(tokens, 0.0)
        return {name: self._typical_s * (found / mean - 1) for name, found in tokens.items()}

    def note(self, name: str, n_tokens: float, seconds: float, now: float) -> None:
        """Count a prompt that was sent somewhere; ``seconds``: what it takes there by itself."""
        faded = math.exp(-max(0.0, now - self._at) / _MEMORY_S)
        self._at = now
        for other in self._tokens:
            self._tokens[other] *= faded
        self._tokens[name] = self._tokens.get(name, 0.0) + n_tokens
        self._typical_s += _STEP * (seconds - self._typical_s)

    def forget(self, name: str) -> None:
        """Drop an instance that is gone."""
        self._tokens.pop(name, None)
