"""What a node has of its cache, as an attached engine has it: the calls, and nothing that needs a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from p2pkv.attach.cache import AttachedCache, unsupported
from p2pkv.attach.own_pages import OwnPages


class AttachedCaching:
    """Stands where a node has :class:`~p2pkv.parts.cache.CacheParts`; what only that can do is refused."""

    drained = None

    def __init__(self, cache: AttachedCache) -> None:
        self.cache = cache

    @property
    def events(self) -> OwnPages:
        """What is told in this process of the pages that it has published."""
        return self.cache.own_pages

    @property
    def prefetcher(self) -> NoReturn:
        """Refuse."""
        raise unsupported("prefetch")

    @property
    def pins(self) -> NoReturn:
        """Refuse."""
        raise unsupported("pin pages")

    @property
    def drainer(self) -> NoReturn:
        """Refuse."""
        raise unsupported("drain")

    def hand_over(self, keys: Sequence[str | bytes], to: str, deadline: float) -> NoReturn:
        """Refuse."""
        raise unsupported("hand pages over")
