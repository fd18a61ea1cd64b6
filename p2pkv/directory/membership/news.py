"""What changed of late: told to a few peers at once, and again to those who still believe otherwise.

Changes travel as they are, not as whole views. A peer whose digest differs from ours is told what changed here
lately, as it tells us; only when that did not help are views exchanged.

While members find out one by one that one of them is lost, digests differ in whether it is one, and who is told of it
takes it in at the end of its own round. So a difference leads to whole views when it stays the same, or does not end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from p2pkv.directory.view import Member

RECENT_S = 5.0
"""For how long a change may still be unknown to a peer that merely has not heard of it yet."""
MAX_NEWS = 1024
"""Records told at once; what is more comes with the exchange of views that follows."""
_PATIENCE_S = 1.0
"""How long a difference may stay the same until views are exchanged: a round, at whose end news that came during it is
taken in, and as much until the next look. With less, a loss among 200 members led to whole views."""
_FORGOTTEN_S = 600.0
"""After so long a peer that was not looked at again is forgotten: the longest rotation takes less."""


@dataclass(frozen=True, slots=True)
class _Difference:
    """What two digests were when they were looked at last, and since when."""

    digests: tuple[int, int]
    same_since: float
    differs_since: float
    """Since when they have differed at every look, with at most ``RECENT_S`` between two."""
    looked_at: float


class News:
    """The changes of a node's view. Owned by the engine's thread."""

    def __init__(self) -> None:
        self._untold: dict[str, Member] = {}
        self._recent: dict[str, tuple[Member, float]] = {}
        self._differences: dict[str, _Difference] = {}

    @property
    def is_untold(self) -> bool:
        """Whether there is something that nobody was told of yet."""
        return bool(self._untold)

    def add(self, members: Iterable[Member], now: float) -> None:
        """Take in records that changed."""
        for member in members:
            self._untold[member.node_id] = member
            self._recent.pop(member.node_id, None)
            self._recent[member.node_id] = (member, now)

    def take(self) -> list[Member]:
        """Return what nobody was told of yet, the newest at most; the caller tells it."""
        untold, self._untold = list(self._untold.values()), {}
        return untold[-MAX_NEWS:]

    def recent(self, now: float) -> list[Member]:
        """Return what changed lately, the newest last."""
        for node_id in [node_id for node_id, (_, at) in self._recent.items() if at + RECENT_S < now]:
            del self._recent[node_id]
        return [member for member, _ in self._recent.values()][-MAX_NEWS:]

    def sort_out(self, theirs: Mapping[str, int], ours: int, now: float) -> tuple[list[str], list[str]]:
        """Note the digests at these addresses; return whom to tell what is new, and whom to exchange views with.

        A digest that differs right after an exchange is given its time anew.
        """
        tell, exchange = [], []
        for address, digest in theirs.items():
            before = self._differences.pop(address, None)
            if digest == ours:
                continue
            same_since = differs_since = now
            if before is not None:
                same_since = before.same_since if before.digests == (digest, ours) else now
                differs_since = before.differs_since if now <= before.looked_at + RECENT_S else now
            self._differences[address] = _Difference((digest, ours), same_since, differs_since, now)
            # where changes never end digests never stay the same, and what is lacking is no news any more
            if now - same_since >= _PATIENCE_S or now - differs_since >= RECENT_S:
                exchange.append(address)
            else:
                tell.append(address)
        for address, difference in list(self._differences.items()):
            if difference.looked_at + _FORGOTTEN_S < now:
                del self._differences[address]
        return tell, exchange

    def exchanged(self, address: str) -> None:
        """Note that views were exchanged with an address."""
        self._differences.pop(address, None)
