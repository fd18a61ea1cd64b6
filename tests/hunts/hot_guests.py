"""Hot guests of a hunt's node: what is hot comes and goes within the seconds that a schedule takes."""

from __future__ import annotations

import time

from p2pkv import Node
from p2pkv.cache.hot_guests import HotGuests, Limits
from p2pkv.parts.hot_guests import make_hot_guests

_LIMITS = Limits(hot_rate=0.05, cool_rate=0.1, least_looks=1)
"""What was found once is hot, and cools unless that was in the last ten seconds."""
_HASTE = 400.0
"""So much faster time goes for what is hot: after a bump nothing comes for a twentieth of a second."""


def hot_guests_of(node: Node, room: int) -> HotGuests:
    """Return what looks for hot pages when it is told to, and closes before its node."""
    caching = node._parts.caching
    assert caching is not None
    epochs = node._parts.control.epochs
    return make_hot_guests(
        caching,
        epochs,
        node.metrics,
        room,
        touch=True,
        limits=_LIMITS,
        clock=lambda: _HASTE * time.monotonic(),
    )
