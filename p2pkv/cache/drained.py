"""What became of a node's pages when it drained, and how that is asked for and said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from p2pkv.control.wire import U32
from p2pkv.errors import ControlError
from p2pkv.message_types import worked_out

DRAIN_SLACK_S = 1.0
"""For how long more than a drain may take it is waited for that others are done with theirs, which began with it."""
MAX_DRAIN_S = 3600.0
_AS_CONFIGURED = 0xFFFF_FFFF


@worked_out
@dataclass(frozen=True, slots=True)
class Drained:
    """What became of a node's pages when it drained."""

    n_pages: int
    """So many it had in its pool that were its own."""
    n_handed_over: int
    """So many others have now."""
    n_adopted: int
    """So many pages of this node are their holders' own since: these, and others that they had prefetched before. One
    that is not stays a guest, which is found as long as it is not evicted."""
    receivers: Mapping[str, int]
    """How many of the pages that were handed over each node has taken."""
    reason: str
    """Why the rest was not, in a few words; empty if there is no rest."""
    seconds: float


def pack_drain(seconds: float | None) -> bytes:
    """Build the body of a DRAIN; None: as long as the node's own setting says."""
    return U32.pack(_AS_CONFIGURED if seconds is None else int(seconds * 1000))


def asked_seconds(body: bytes, configured: float) -> float:
    """Read it. Raises :class:`~p2pkv.errors.ControlError` for one that no node could have sent."""
    if len(body) != U32.size:
        raise ControlError("a drain of a wrong length")
    (milliseconds,) = U32.unpack(body)
    return configured if milliseconds == _AS_CONFIGURED else min(milliseconds / 1000, MAX_DRAIN_S)


def encode_drained(drained: Drained | None) -> bytes:
    """Build the answer to a DRAIN: nothing is known while pages are being handed over."""
    return msgspec.msgpack.encode(drained)


def decode_drained(body: bytes) -> Drained | None:
    """Read it. Raises :class:`~p2pkv.errors.ControlError` for what no node could have sent."""
    try:
        return msgspec.msgpack.decode(body, type=Drained | None)
    except msgspec.DecodeError as error:
        raise ControlError(f"an answer to a drain that can't be read: {error}") from error


def sentence(drained: Drained) -> str:
    """Say in one line what has become of a node's pages."""
    whom = ", ".join(f"{n} to {node_id}" for node_id, n in sorted(drained.receivers.items()))
    said = f"handed over {drained.n_handed_over} of {drained.n_pages} pages in {drained.seconds:.1f} s"
    if whom:
        said += f" ({whom})"
    return said + (f"; the rest was not: {drained.reason}" if drained.reason else "")
