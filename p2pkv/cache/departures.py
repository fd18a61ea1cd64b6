"""Who has left of late and may come back: a drain waits a moment for these before it costs others their pages.

Where nodes are restarted one after the other, the one before has all its room free when the next one drains, and is
known to the next one a moment after its peers' views have gone round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable

from p2pkv.directory.view import Member

RECENT_S = 60.0
"""So long ago it may have left: longer than most restarts take. A guess."""
_MOST = 1024
"""So many are remembered, the last ones; a guess far above how many are restarted at once."""


class Departures:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock guards all below
        self._left_at: dict[str, float] = {}
        self._is_leaving = False  # whether one that is there still is about to
        self._is_over = False

    def view_changed(self, others: Collection[Member], gone: Iterable[Member]) -> None:
        """Take in who is there, and who is not any more, or not in the boot that it had."""
        present = {member.node_id for member in others if not member.is_draining}
        now = time.monotonic()
        with self._changed:
            for member in gone:
                if member.weight == 0 and not member.is_draining:
                    continue  # it takes no pages over
                self._left_at.pop(member.node_id, None)  # the last ones are at the end
                self._left_at[member.node_id] = now
            for node_id in present.intersection(self._left_at):
                del self._left_at[node_id]
            for node_id in list(self._left_at)[:-_MOST]:
                del self._left_at[node_id]
            self._is_leaving = len(present) < len(others)
            self._changed.notify_all()

    def wait(self, until: float) -> None:
        """Block until all of them are back, or until then. Returns at once while nobody is expected."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_expecting(), max(0.0, until - time.monotonic()))

    def interrupt(self) -> None:
        """Let nobody wait any more: this node is being closed."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _is_expecting(self) -> bool:
        if self._is_over:
            return False
        earliest = time.monotonic() - RECENT_S
        return self._is_leaving or any(at >= earliest for at in self._left_at.values())
