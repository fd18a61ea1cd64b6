"""How the keys of one kind of pages begin: what SGLang's page hashes do not say, digested."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from p2pkv.integrations.sglang.settings import Rank
from p2pkv.integrations.sglang.weights import Weights


class KeyPrefix:
    """The beginning of the keys of one kind of pages, which changes with the weights. Thread-safe."""

    def __init__(self, kind: str, rank: Rank, weights: Weights, *, is_shared: bool) -> None:
        """Make it of ``kind`` and, unless all tensor-parallel ranks share such pages, of this rank's place."""
        place = "every tp rank" if is_shared else f"tp {rank.tp_rank}/{rank.tp_size}"
        self._kind = f"{kind} {place}"
        self._weights = weights
        self._made = ("", "")  # the weights' name, and the prefix with it; replaced as one

    def __str__(self) -> str:
        """Return the prefix with the weights as they are now."""
        name = self._weights.name
        made_for, prefix = self._made
        if made_for != name:
            text = f"{self._kind} weights={name}"
            prefix = hashlib.blake2b(text.encode(), digest_size=16).hexdigest() + "/"
            self._made = (name, prefix)
        return prefix

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """Return the keys of pages, all of the same weights."""
        prefix = str(self)
        return [prefix + page for page in hashes]
