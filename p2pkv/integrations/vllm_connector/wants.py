"""What a decode rank tells a prefill rank whose blocks it can take in parts only: which parts.

A prefill instance does not know who will take a hand-off, so it offers its blocks whole. A decode rank that shares the
model otherwise *puts* one row to each rank that it takes from, under :func:`inbox`; the prefill rank then offers it
what it wants instead, under :func:`parts_of`, for which the decode rank is asking already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import UsageError
from p2pkv.integrations.vllm_connector.handoff import Rank
from p2pkv.integrations.vllm_connector.shares import Share
from p2pkv.node import Node
from p2pkv.offers.transfers import MAX_ROWS
from p2pkv.transfers import Offer, RowStatus

WANT_NBYTES = 1024
"""Of the row; what is left of it is zero."""
MAX_RANKS = 32
"""Of a decode instance that takes parts: each has a row of its own in the inbox."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class WantedGroup(msgspec.Struct, frozen=True):
    """What is wanted of one group of layers."""

    share: Share
    """What the decode rank holds of it."""
    first: _Number = 0
    """Of the request's granules (:class:`~p2pkv.integrations.vllm_connector.shares.Pair`), the first that is wanted."""
    n: _Number = 0
    """How many are."""


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


def parts_of(handoff: str, want: Want, group: int, n_rows: int) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the first and the last (exclusive) row of each offer that answers a want, of one group.

    Whoever wants something else, as a rank of the same number in an instance of other stages does, finds nothing under
    these names: what is a layer's row to one is another's to the other.
    """
    digest = hashlib.blake2b(msgspec.json.encode(want), digest_size=16).hexdigest()
    for first in range(0, n_rows, MAX_ROWS):
        yield f"{handoff}/{digest}/{group}/{first}", first, min(first + MAX_ROWS, n_rows)


class Wants:
    """What one load tells prefill's ranks; the rows lie here until they have been taken, or the load ends."""

    def __init__(self, node: Node, handoff: str, wants: Sequence[tuple[Rank, Want]]) -> None:
        """Make the rows. Raises UsageError if one is too long."""
        self._node, self._name = node, inbox(handoff)
        self._rows = np.stack([want.to_row() for _, want in wants])
        self._to = [(rank.node_id, want.rank) for rank, want in wants]
        self._offers: list[Offer | None] = [None] * len(wants)
        self._memory = node.register_memory(self._rows, readable=True)

    def put(self, timeout: float) -> None:
        """Tell those who have not heard and are not being told; returns at once if they are connected."""
        for number, (node_id, rank) in enumerate(self._to):
            offer = self._offers[number]
            if offer is None or _is_lost(offer):
                row = np.array([[self._rows[number].ctypes.data, WANT_NBYTES]], np.int64)
                self._offers[number] = self._node.transfers.put_async(
                    node_id, self._name, row, first_row=rank, lease=timeout
                )

    @property
    def is_lost(self) -> bool:
        """Whether somebody has not heard, and is not being told."""
        return any(offer is not None and _is_lost(offer) for offer in self._offers)

    @property
    def is_done(self) -> bool:
        """Whether all have heard, or can't be told."""
        return all(offer is None or offer.done() for offer in self._offers)

    def close(self) -> None:
        """Take back what nobody has heard; waits for who is reading it. Idempotent."""
        self._memory.close()


def _is_lost(offer: Offer) -> bool:
    return offer.done() and bool((offer.statuses() == RowStatus.PEER_LOST).any())
