"""Connections to other nodes' shards: opened in the background, leased to one call at a time.

The first questions to a node go over the control socket. Meanwhile a channel to its shard is opened
(``native/include/p2pkv/directory_server.h``), and from then on a look-up costs a third. Where a channel can't be had,
because a firewall lets the control port through and no other, all goes on over the control socket.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import compress

from p2pkv import _native
from p2pkv.directory.view import Member, View

_log = logging.getLogger(__name__)

NAME = "directory"
"""What CONNECT asks for; no transport may be called so."""
_OPEN_S = 1.0
_RETRY_S = 30.0
"""Until a node that let no channel in is asked for one again."""
_MOST_IDLE = 64
"""Kept a node; as many threads can ask it at once without a new one."""

Connect = Callable[[Member, str, bytes, float], "tuple[bytes, bytes] | None"]
"""``(member, name, our half, deadline)`` to the peer's half; None: no answer, or refused."""


class DirectoryChannels:
    """Thread-safe. A thread of its own opens what was missing, from the first call until :meth:`close`."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        # Guards all below. Taken by itself and not through the condition, whose `with` is Python: an exception of a
        # signal's handler in the middle of that would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._idle: dict[str, list[_native.DirectoryChannel]] = {}
        self._leased: set[_native.DirectoryChannel] = set()
        self._wanted: dict[str, Member] = {}
        self._not_before: dict[str, float] = {}
        self._owed: dict[
            str, list[tuple[int, float]]
        ] = {}  # leases to release by the next channel, and their ends
        self._view = View()
        self._opener: threading.Thread | None = None
        self._closed = False

    def set_view(self, view: View) -> None:
        """Hang up on nodes that are gone or were restarted."""
        with self._lock:
            gone = [
                node_id
                for node_id in {*self._idle, *self._not_before, *self._owed}
                if not _is_same(self._view.get(node_id), view.get(node_id))
            ]
            self._view = view
            for node_id in gone:
                self._idle.pop(node_id, None)
                self._not_before.pop(node_id, None)
                self._owed.pop(node_id, None)

    def lease(self, members: Sequence[Member]) -> list[_native.DirectoryChannel] | None:
        """Return a channel to each; None if one is missing, which is opened for the calls to come.

        Give them back with :meth:`give_back`.
        """
        with self._lock:
            channels: list[_native.DirectoryChannel] = []
            for member in members:
                idle = self._idle.get(member.node_id)
                if not idle:
                    self._want(member)
                    self._keep(members[: len(channels)], channels)
                    return None
                channels.append(idle.pop())
            self._leased.update(channels)
            return channels

    def give_back(
        self,
        members: Sequence[Member],
        channels: Sequence[_native.DirectoryChannel],
        is_usable: Sequence[bool],
    ) -> None:
        """Keep those that can be used again; the others close."""
        with self._lock:
            self._leased.difference_update(channels)
            self._keep(list(compress(members, is_usable)), list(compress(channels, is_usable)))

    def release(self, member: Member, lease: int, seconds: float) -> None:
        """Tell a node that a lease of ``seconds`` is over: now, or by the next channel to it that is free.

        Waits for nothing.
        """
        with self._lock:
            channels = self.lease([member])
            if channels is not None:
                self.give_back([member], channels, [channels[0].release(lease)])
                return
            now = time.monotonic()
            owed = [(number, until) for number, until in self._owed.get(member.node_id, ()) if until > now]
            self._owed[member.node_id] = [*owed, (lease, now + seconds)]

    def _keep(self, members: Sequence[Member], channels: Sequence[_native.DirectoryChannel]) -> None:
        for member, channel in zip(members, channels, strict=True):
            if not self._closed and _is_same(member, self._view.get(member.node_id)):
                idle = self._idle.setdefault(member.node_id, [])
                if len(idle) < _MOST_IDLE and self._tell_owed(member.node_id, channel):
                    idle.append(channel)

    def _tell_owed(self, node_id: str, channel: _native.DirectoryChannel) -> bool:
        """Release over a free channel what could not be before; whether the channel can still be used."""
        now = time.monotonic()
        return all(channel.release(lease) for lease, until in self._owed.pop(node_id, ()) if until > now)

    def close(self) -> None:
        """End calls under way, and open no more. Idempotent."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            for channel in self._leased:
                channel.interrupt()
            self._changed.notify_all()
            opener = self._opener
        if opener is not None:
            opener.join()

    def _want(self, member: Member) -> None:
        if self._closed or time.monotonic() < self._not_before.get(member.node_id, 0.0):
            return
        self._wanted[member.node_id] = member
        if self._opener is None:
            self._opener = threading.Thread(target=self._open_wanted, name="p2pkv-channels", daemon=True)
            self._opener.start()
        self._changed.notify_all()

    def _open_wanted(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                node_id, member = next(iter(self._wanted.items()))
            problem = self._open(member)
            with self._lock:
                self._wanted.pop(node_id, None)
                if problem is not None and not self._closed:
                    self._not_before[node_id] = time.monotonic() + _RETRY_S
                    _log.warning(
                        "no directory channel to %s, its shard is asked over the control socket: %s",
                        node_id,
                        problem,
                    )

    def _open(self, member: Member) -> str | None:
        """Open one channel; say what was in the way."""
        deadline = time.monotonic() + _OPEN_S
        try:
            answer = self._connect(member, NAME, _native.DirectoryChannel.request(), deadline)
            if answer is None:
                return "no answer to the handshake"
            door, _ = answer
            left = deadline - time.monotonic()
            channel = _native.DirectoryChannel.open(door, member.boot_epoch, left)
        except Exception as error:  # noqa: BLE001  # the top of a thread's loop: a broken peer is one without a channel
            return str(error)
        self.give_back([member], [channel], [True])
        return None


def _is_same(before: Member | None, now: Member | None) -> bool:
    """Whether both are the same boot of a node that is there."""
    return before is not None and now is not None and now.is_present and now.boot_epoch == before.boot_epoch
