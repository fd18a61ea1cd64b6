"""Hot guests of a hunt's node: what is hot comes and goes within the seconds that a schedule takes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from p2pkv import Config, Node
from p2pkv.attach.finding import Finding
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


class HotEngine:
    """An engine that is attached to a hunt's node, and tells it what it finds when it is told to."""

    @staticmethod
    def host_settings(folder: Path, node_id: str) -> dict[str, Any]:
        """Return what a node is started with that lets one in, and hears what it finds.

        Nothing comes by the node's own thread: its share is less than a page.
        """
        (folder / node_id).mkdir(mode=0o700, exist_ok=True)
        return {"attach_listen": f"unix:{folder}/{node_id}/s", "hot_share": 1e-9}

    def __init__(self, host: Node, transports: str, shape: tuple[int, int]) -> None:
        """``shape``: pages of its memory, and bytes of each."""
        config = host._parts._config
        self.node = Node.start(
            Config(
                attach=config.attach_listen,
                transports=transports,
                device_staging_size="1MiB",
                deadline=config.deadline,
            )
        )
        self.memory = np.zeros(shape, np.uint8)
        self.node.register_memory(self.memory)
        own = self.node._parts.finding
        assert isinstance(own, Finding)
        # After a bump it says nothing for a while, as the node brings nothing.
        self._finding = Finding(
            own._own_host, own._finds, own._epoch_now, clock=lambda: _HASTE * time.monotonic()
        )

    def tell(self) -> None:
        """Tell the node what is found, if it is there."""
        self._finding.turn()

    @property
    def n_guests_found(self) -> int:
        """Pages that calls found in the node's pool, as other nodes' pages."""
        return int(self.node.counters()["p2pkv_fetched_guest_pages_total"])
