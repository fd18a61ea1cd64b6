"""Those who take pages over from a node that drains: their room, what they have, and why they take no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from p2pkv.cache.prefetch import PrefetchOutcome
from p2pkv.control.wire import U64, ReplyStatus
from p2pkv.directory.view import Member

TAKEN = (PrefetchOutcome.BROUGHT, PrefetchOutcome.PRESENT)
LATE = (PrefetchOutcome.PENDING, PrefetchOutcome.TIMED_OUT, PrefetchOutcome.CANCELED)
OPEN = (PrefetchOutcome.NO_ROOM, *LATE)
"""Others may have such a page."""
CANT_READ = "it could not read what it was to take over"
_MOST_IN_VAIN = 3
"""So many batches in a row that a node could read nothing of mean that its way to this one is barred; a guess."""


@dataclass(slots=True)
class Receiver:
    """A node that may take pages over. Used by one thread at a time."""

    member: Member
    free: int = 0
    replaceable: int = 0
    refusal: str = ""
    is_silent: bool = False
    """It has not answered once: whether it still has what it took is not known."""
    taken: list[NDArray[np.void]] = field(default_factory=list)
    """Pages that it has, those used last first."""
    unread: list[NDArray[np.void]] = field(default_factory=list)
    """Pages that are there and could not be read by it; others may have a way to this node where it has none."""
    n_in_vain: int = 0
    """So many batches in a row it could read nothing of."""
    n_gone: int = 0
    """Pages that were not there any more when it came to read them."""

    @property
    def n_taken(self) -> int:
        """How many pages it has."""
        return sum(map(len, self.taken))

    def room(self, *, may_replace: bool) -> int:
        """Return how many bytes of pages it may take."""
        return self.free + (self.replaceable if may_replace else 0)

    def take_room(self, body: bytes) -> None:
        """Take in what an answer says first: how much more it has room for."""
        (self.free,), (self.replaceable,) = U64.unpack_from(body), U64.unpack_from(body, U64.size)

    def note_unread(self, uses: NDArray[np.void], outcomes: NDArray[np.uint8]) -> NDArray[np.void]:
        """Remember which pages of a batch could not be read; return those that others are to have at once.

        One page that nobody can read costs nobody the others: it comes after them. Who can read nothing is asked no
        more, and what was tried with it is the first again.
        """
        unread: NDArray[np.void] = uses[outcomes == PrefetchOutcome.NOT_READ]
        for_others: NDArray[np.void] = unread[:0]
        if not len(unread):
            self.n_in_vain = 0
            return for_others
        self.unread.append(unread)
        self.n_in_vain = 0 if np.isin(outcomes, TAKEN).any() else self.n_in_vain + 1
        if self.n_in_vain >= _MOST_IN_VAIN:
            self.refusal = self.refusal or CANT_READ
            for_others, self.unread = np.concatenate(self.unread), []
        return for_others


def refusal_of(status: ReplyStatus, body: bytes) -> str:
    """Return in words why a node takes nothing over, by its answer."""
    if status is ReplyStatus.MALFORMED:
        return "its p2pkv takes no pages over; upgrade it"
    return body.decode(errors="replace") or f"it answered {status.name}"


def why_left(receivers: Sequence[Receiver], *, is_over: bool) -> str:
    """Return in words why pages were left with the leaver; ``is_over``: its time was."""
    if not receivers:
        return "no other node that could take them answers"
    refusals = [f"{one.member.node_id}: {one.refusal}" for one in receivers if one.refusal]
    if is_over:
        return "the time was over"
    if refusals:
        return "; ".join(refusals[:4])
    return "the others have no room for more"
