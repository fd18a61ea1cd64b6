"""Members that were given up of late, and may live all the same: on a busy machine a node can be given up by mistake.

Such a node believes what it knows until it hears that it was given up, within a second or so. Whatever it must not
believe meanwhile it is told as if it were a member, but it is waited for a moment only: most that were given up have
died.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from p2pkv.directory.view import Member, State, View

RECENT_S = 60.0
"""So long ago it may have been given up. One that lives has heard of it long before, where others can reach it."""
MOST = 64
"""So many are told, the last ones: of a whole rack that lost its power nobody answers. A guess."""
MOMENT_S = 0.25
"""So long they are waited for. A guess: a node that is only late has answered within it, and a bump takes no longer
than that for having to do with the dead."""

_Boot = tuple[str, int]


class GivenUp:
    """Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()  # held while the next is replaced by another one
        self._members: dict[_Boot, tuple[Member, float]] = {}  # and when; the last ones are at the end

    def view_changed(self, new: View, gone: Iterable[Member]) -> None:
        """Take in who is no member any more. One that has come back stays: who asks knows the members, too."""
        now = self._now()
        with self._lock:
            members = dict(self._members)
            for member in gone:
                later = new.get(member.node_id)
                if later is None or later.state is State.DEAD:  # and has not left, or been started again
                    boot = (member.node_id, member.boot_epoch)
                    members.pop(boot, None)
                    members[boot] = (member, now)
            self._members = {
                boot: (member, at)
                for boot, (member, at) in list(members.items())[-MOST:]
                if now - at < RECENT_S and not _is_over(member, new.get(member.node_id))
            }

    def recent(self) -> list[Member]:
        """Return them, as they were last as members; some may be members again.

        Waits for nobody: a signal's handler may close the node wherever who asks is, and whoever tells of views.
        """
        earliest = self._now() - RECENT_S
        return [member for member, at in self._members.values() if at > earliest]


def _is_over(member: Member, now: Member | None) -> bool:
    """Whether the process that was this member has left, or was started again."""
    return now is not None and (now.boot_epoch != member.boot_epoch or now.state is State.LEFT)
