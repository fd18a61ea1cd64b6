"""What a decode rank tells a prefill rank whose blocks it can take in parts only: which parts.

A prefill instance does not know who will take a hand-off, so it offers its blocks whole. A decode rank that shares the
model otherwise *puts* one row to each rank that it takes from, under :func:`inbox`; the prefill rank then offers it
what it wants instead, under :func:`part_of`, for which the decode rank is asking already.

If nothing will come the decode rank hears so at once: it asks for a row besides that is offered only to be taken back,
under :func:`refusal_of` when the prefill rank does not give what is wanted, under :func:`end_of` when it needs the
blocks no more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import UsageError
from p2pkv.integrations.vllm_connector.handoff import Rank
from p2pkv.integrations.vllm_connector.shares import Share
from p2pkv.message_types import worked_out
from p2pkv.node import Node
from p2pkv.transfers import Grant, Offer, RowStatus

WANT_NBYTES = 1024
"""Of the row; what is left of it is zero."""
MAX_RANKS = 32
"""Of a decode instance that takes parts: each has rows of its own in the inbox."""
PLACES = 2
"""Rows of each. The first one is for who says first what he wants; another one must be heard to be refused."""

REFUSAL_NBYTES = 1
"""Of the row that is taken back."""
_REFUSALS = (RowStatus.GONE, RowStatus.REJECTED, RowStatus.OK)
"""What becomes of it: it was taken back before it was asked for, afterwards, or not quite soon enough."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class WantedGroup(msgspec.Struct, frozen=True):
    """What is wanted of one group of layers."""

    share: Share
    """What the decode rank holds of it."""
    first: _Number = 0
    """Of the request's granules (:class:`~p2pkv.integrations.vllm_connector.shares.Pair`), the first that is wanted."""
    n: _Number = 0
    """How many are."""


@worked_out
class Want(msgspec.Struct, frozen=True):
    """What one decode rank wants of one request from one prefill rank."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    """Its number in its instance."""
    tp_rank: _Number
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    groups: tuple[WantedGroup, ...]

    def to_row(self) -> NDArray[np.uint8]:
        """Return it as a row. Raises UsageError if it is too long for one."""
        text = msgspec.json.encode(self)
        if len(text) > WANT_NBYTES:
            raise UsageError(f"what this rank holds takes {len(text)} bytes to say, of {WANT_NBYTES} at most")
        row: NDArray[np.uint8] = np.frombuffer(text.ljust(WANT_NBYTES, b"\0"), np.uint8)
        return row

    @classmethod
    def from_row(cls, row: NDArray[np.uint8]) -> Want:
        """Read one. Raises UsageError for what is none: any member may have written it."""
        try:
            want: Want = msgspec.json.decode(row.tobytes().rstrip(b"\0"), type=cls)
        except msgspec.DecodeError as error:
            raise UsageError(f"not a want: {error}") from error
        return want


def inbox(handoff: str) -> str:
    """Return the name under which wants of a hand-off are put."""
    return f"{handoff}/wants"


def part_of(handoff: str, want: Want, group: int) -> str:
    """Return the name of the offer that answers a want, of one group.

    Whoever wants something else, as a rank of the same number in an instance of other stages does, finds nothing under
    that name: what is a layer's row to one is another's to the other.
    """
    return f"{handoff}/{_digest(want)}/{group}"


def end_of(handoff: str) -> str:
    """Return the name under which a prefill rank that needs a hand-off's blocks no more takes one row back."""
    return f"{handoff}/end"


def refusal_of(handoff: str, want: Want) -> str:
    """Return the name under which it does so if it offers nothing of what is wanted."""
    return f"{handoff}/{_digest(want)}/refusal"


def _digest(want: Want) -> str:
    return hashlib.blake2b(msgspec.json.encode(want), digest_size=16).hexdigest()


@dataclass(slots=True)
class _Told:
    """One prefill rank that is told, and what it is asked for in return."""

    rank: Rank
    want: Want
    row: NDArray[np.int64]
    """Where the want lies."""
    offer: Offer | None = None
    place: int = 0
    """Which of its rows in the inbox the want goes to."""
    refusals: list[Grant] = field(default_factory=list)

    @property
    def is_lost(self) -> bool:
        """Whether it has not heard, and is not being told."""
        return self.is_unsaid or any(_ended_as(RowStatus.PEER_LOST, grant) for grant in self.refusals)

    @property
    def is_unsaid(self) -> bool:
        """Whether the want must be put, or put once more."""
        is_lost = _ended_as(RowStatus.PEER_LOST, self.offer)
        return self.offer is None or is_lost or (self.is_taken and self.place + 1 < PLACES)

    @property
    def is_taken(self) -> bool:
        """Whether somebody else has said what he wants in this place."""
        return _ended_as(RowStatus.DUPLICATE, self.offer)

    @property
    def refuses(self) -> bool:
        """Whether it offers nothing that it has not offered yet."""
        return any(np.isin(grant.statuses(), _REFUSALS).any() for grant in self.refusals)


class Wants:
    """What one load tells prefill's ranks; the rows lie here until they have been taken, or the load ends."""

    def __init__(self, node: Node, handoff: str, wants: Sequence[tuple[Rank, Want]]) -> None:
        """Make the rows. Raises UsageError if one is too long."""
        self._node, self._handoff = node, handoff
        self._rows = np.stack([want.to_row() for _, want in wants] + [np.zeros(WANT_NBYTES, np.uint8)])
        *rows, refusal = (row.ctypes.data for row in self._rows)
        self._told = [
            _Told(rank, want, np.array([[row, WANT_NBYTES]], np.int64))
            for (rank, want), row in zip(wants, rows, strict=True)
        ]
        self._refusal = np.array([[refusal, REFUSAL_NBYTES]], np.int64)
        self._memory = node.register_memory(self._rows, readable=True)

    def put(self, timeout: float) -> None:
        """Tell those who have not heard and are not being told; returns at once if they are connected."""
        transfers = self._node.transfers
        for told in self._told:
            if not told.is_lost:
                continue
            if told.is_unsaid:
                told.place += told.is_taken
                told.offer = transfers.put_async(
                    told.rank.node_id,
                    inbox(self._handoff),
                    told.row,
                    first_row=told.place * MAX_RANKS + told.want.rank,
                    lease=timeout,
                )
            names = end_of(self._handoff), refusal_of(self._handoff, told.want)
            told.refusals = [
                transfers.get_async(told.rank.node_id, name, self._refusal, timeout=timeout) for name in names
            ]

    @property
    def is_lost(self) -> bool:
        """Whether somebody has not heard, and is not being told."""
        return any(told.is_lost for told in self._told)

    @property
    def is_done(self) -> bool:
        """Whether all have heard, or can't be told."""
        return all(told.offer is None or told.offer.done() for told in self._told)

    def refusing(self) -> set[str]:
        """Return the nodes of those who offer nothing that they have not offered yet."""
        return {told.rank.node_id for told in self._told if told.refuses}

    def close(self) -> None:
        """Take back what nobody has heard; waits for who is reading it. Idempotent."""
        self._memory.close()


def _ended_as(status: RowStatus, transfer: Offer | Grant | None) -> bool:
    return transfer is not None and transfer.done() and bool((transfer.statuses() == status).any())
