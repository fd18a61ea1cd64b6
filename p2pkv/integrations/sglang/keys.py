"""How the keys of one kind of pages begin: what SGLang's page hashes do not say, digested.

A page whose heads are split has a key for each of its shares, a share being what one rank of a larger server has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from p2pkv.integrations.sglang.settings import Rank
from p2pkv.integrations.sglang.weights import Weights


class KeyPrefix:
    """The beginning of the keys of one kind of pages, which changes with the weights. Thread-safe."""

    def __init__(
        self, kind: str, rank: Rank, weights: Weights, *, is_shared: bool, n_shares: int = 1
    ) -> None:
        """Make it of ``kind`` and, unless all tensor-parallel ranks share such pages, of this rank's place.

        A rank whose pages have ``n_shares`` stands in as many places of a server of so many times its size.
        """
        size = rank.tp_size * n_shares
        places = [f"tp {rank.tp_rank * n_shares + share}/{size}" for share in range(n_shares)]
        self._kinds = [f"{kind} {place}" for place in (["every tp rank"] if is_shared else places)]
        self._weights = weights
        self._made: tuple[str, list[str]] = ("", [])
        """The weights' name and the prefixes made with it; both are replaced at once."""

    def __str__(self) -> str:
        """Return the prefix, of a page's first share, with the weights as they are now."""
        return self._prefixes()[0]

    def _prefixes(self) -> list[str]:
        name = self._weights.name
        made_for, prefixes = self._made
        if made_for != name:
            texts = [f"{kind} weights={name}" for kind in self._kinds]
            prefixes = [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() + "/" for text in texts]
            self._made = (name, prefixes)
        return prefixes

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """Return the keys of pages, those of a page's shares one after another, all of the same weights."""
        prefixes = self._prefixes()
        return [prefix + page for page in hashes for prefix in prefixes]
