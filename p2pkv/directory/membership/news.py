"""What changed of late: told to a few peers at once, and again to those who still believe otherwise.

Changes travel as they are, not as whole views. A peer whose digest differs from ours is told what changed here
lately, as it tells us; only when that did not help are views exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from p2pkv.directory.view import Member

RECENT_S = 5.0
"""For how long a change may still be unknown to a peer that merely has not heard of it yet."""
MAX_NEWS = 1024
"""Records told at once; what is more comes with the exchange of views that follows."""
_DIFFERENT_ROUNDS = 2
"""So many rounds a peer may differ before views are exchanged: in the first it is told what is new."""


class News:
    """The changes of a node's view. Owned by the engine's thread."""

    def __init__(self) -> None:
        self._untold: dict[str, Member] = {}
        self._recent: dict[str, tuple[Member, float]] = {}
        self._rounds: dict[str, int] = {}

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

    def sort_out(self, differs: Mapping[str, bool]) -> tuple[list[str], list[str]]:
        """Note which addresses' digests differ now; return whom to tell what is new, and whom to exchange views with.

        A digest that differs right after an exchange is given its rounds anew.
        """
        tell, exchange = [], []
        for address, is_different in differs.items():
            rounds = self._rounds.pop(address, 0) + 1 if is_different else 0
            if 0 < rounds < _DIFFERENT_ROUNDS:
                tell.append(address)
                self._rounds[address] = rounds
            elif rounds:
                exchange.append(address)
                self._rounds[address] = rounds
        for address in [address for address in self._rounds if address not in differs]:
            del self._rounds[address]
        return tell, exchange

    def exchanged(self, address: str) -> None:
        """Note that views were exchanged with an address."""
        self._rounds.pop(address, None)
