"""What p2pkv nodes hold of a prompt's beginning, by node and tier: plain numbers for whoever weighs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """Where a page lies: in a node's memory, or on its disk alone."""

    node_id: str
    is_on_disk: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """Tokens by place. The beginning that somebody holds ends where nobody holds the next page."""

    tokens: Mapping[Place, int] = field(default_factory=dict)

    @classmethod
    def of(cls, places: Iterable[Place | None], n_tokens: int) -> Held:
        """Count pages of ``n_tokens`` each, given in the prompt's order; None is where nobody has one."""
        tokens: dict[Place, int] = {}
        for place in places:
            if place is None:
                break
            tokens[place] = tokens.get(place, 0) + n_tokens
        return cls(tokens)

    @property
    def total(self) -> int:
        """Whoever has them: they can be fetched."""
        return sum(self.tokens.values())

    def at(self, node_id: str) -> int:
        """Those of one node, in memory and on disk."""
        return sum(n for place, n in self.tokens.items() if place.node_id == node_id)
