"""Prefill's nodes that may not be known here yet: how long a load waits for one to appear."""

from __future__ import annotations

import threading
import time

from p2pkv.integrations.vllm_connector.handoff import Rank
from p2pkv.node import Node
from p2pkv.offers.transfers import DEATH_GRACE_S

_MEET_S = DEATH_GRACE_S
"""How long to wait for a node to appear in the view: news of one that has just started takes about a second, and a
verdict of death that is taken back a little longer."""
_LOOK_S = 0.02
_MAX_AWAITED = 1024
"""Nodes; a hand-off comes from outside and may name any."""


class Meeting:
    """Thread-safe."""

    def __init__(self, node: Node, closing: threading.Event) -> None:
        """Ask ``node`` who is there, until ``closing``."""
        self._node, self._closing = node, closing
        self._lock = threading.Lock()  # guards what follows
        self._awaited: dict[tuple[str, int], float] = {}  # until when a node that is not there is waited for

    def is_there(self, rank: Rank, deadline: float) -> bool:
        """Whether the node is a member in the boot that made the offer. One that is not known yet may be soon.

        It is waited for once, by all loads together: those of a dead instance, however many, must not have all the
        threads until their deadlines, while others wait for one.
        """
        key = (rank.node_id, rank.boot_epoch)
        while True:
            boots = [m.boot_epoch for m in self._node.members() if m.node_id == rank.node_id]
            with self._lock:
                if rank.boot_epoch in boots:
                    self._awaited.pop(key, None)
                    return True
                if len(self._awaited) >= _MAX_AWAITED and key not in self._awaited:
                    self._awaited.clear()
                until = min(deadline, self._awaited.setdefault(key, time.monotonic() + _MEET_S))
            if any(boot > rank.boot_epoch for boot in boots) or time.monotonic() >= until:
                return False
            if self._closing.wait(_LOOK_S):
                return False
