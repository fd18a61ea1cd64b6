"""What all members count, as the page shows it: asked once a second at most, however many look."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from p2pkv.control.counters import decode_counters
from p2pkv.control.sockets import ControlClient, Request
from p2pkv.control.wire import Kind
from p2pkv.directory.view import Member, View
from p2pkv.errors import ControlError

_KEPT_S = 1.0
_ANSWER_S = 1.5
_NOT_SHOWN = ("p2pkv_transfer", "p2pkv_copy_kernel", "p2pkv_kv_event", "python_", "process_")
"""What the page has no place for; fifty members' counters are a megabyte as it is."""


class ClusterReading:
    """Thread-safe. What it asks teaches nobody anything."""

    def __init__(
        self,
        node_id: str,
        cluster: str,
        client: ControlClient,
        view: Callable[[], View],
        own_counters: Callable[[], Mapping[str, float]],
    ) -> None:
        self._node_id = node_id
        self._cluster = cluster
        self._client = client
        self._view = view
        self._own_counters = own_counters
        self._lock = (
            threading.Lock()
        )  # held while members are asked: who comes meanwhile gets the same answer
        self._last: dict[str, object] = {}
        self._until = 0.0

    def read(self) -> dict[str, object]:
        """Return the members and what they count, not older than a second."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._last = self._ask()
                self._until = time.monotonic() + _KEPT_S
            return self._last

    def _ask(self) -> dict[str, object]:
        members = sorted(self._view().values(), key=lambda member: member.node_id)
        others = [m for m in members if m.is_present and m.node_id != self._node_id]
        told = {self._node_id: _shown(self._own_counters()), **self._counters(others)}
        return {
            "at": time.time(),
            "asked": self._node_id,
            "cluster": self._cluster,
            "members": [_record(member) for member in members],
            "counters": told,
        }

    def _counters(self, members: Sequence[Member]) -> dict[str, dict[str, float]]:
        told: dict[str, dict[str, float]] = {}
        requests = [Request(member.address, Kind.COUNTERS, boot=member.boot_epoch) for member in members]
        with self._client.send(requests) as calls:
            for index, reply in calls.replies(_ANSWER_S):
                if reply.ok:
                    with suppress(ControlError):  # nonsense is no answer: the page says that there is none
                        told[members[index].node_id] = _shown(decode_counters(reply.body))
        return told


def _shown(counters: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in counters.items() if not name.startswith(_NOT_SHOWN)}


def _record(member: Member) -> dict[str, object]:
    return {
        "node_id": member.node_id,
        "state": member.condition,
        "boot_epoch": str(member.boot_epoch),  # more digits than JavaScript's numbers have
        "address": member.address,
        "transports": dict(member.transports),
    }
