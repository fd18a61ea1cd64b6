"""Connections to other nodes' shards: opened in the background, lent to one call at a time.

The first questions to a node go over the control socket. Meanwhile a channel to its shard is opened
(``native/src/directory/server.h``), and from then on a look-up costs a third. Where a channel can't be had,
because a firewall lets the control port through and no other, all goes on over the control socket.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import NamedTuple

from p2pkv import _native
from p2pkv.directory.membership.timing import Clock, SystemClock
from p2pkv.directory.view import Member, View
from p2pkv.page import Keys

_log = logging.getLogger(__name__)

NAME = "directory"
"""What CONNECT asks for; no transport may be called so."""
_OPEN_S = 1.0
_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
"""Until a node that let no channel in is asked for one again; doubled from the first to the second."""
_MOST_IDLE = 64
"""Kept a node; as many threads can ask it at once without a new one."""
_UNUSED_S = 60.0
"""After that a channel is closed, but for one a node: owners have a limit on all that they serve."""
_LAST_UNUSED_S = 600.0
"""After that the last one to a node closes too, but to one with a seat, which any look-up may ask: a node would else
have one to each that ever had a page it looked for. It is a guess: the next question to that node goes over the control
socket, which takes three times as long."""
_OPENERS = 4
"""Threads, so that a node which does not answer holds up few others."""

Connect = Callable[[Member, str, bytes, float], "tuple[bytes, bytes] | None"]
"""``(member, name, our half, deadline)`` to the peer's half; None: no answer, or refused."""


def _nobody() -> tuple[Member, ...]:
    return ()


class _Idle(NamedTuple):
    channel: _native.DirectoryChannel
    since: float


class _Failed(NamedTuple):
    not_before: float
    retry_s: float


class DirectoryChannels:
    """Thread-safe. Threads of its own open what was missing, from the first call until :meth:`close`."""

    def __init__(
        self, connect: Connect, seated: Callable[[], Iterable[Member]], clock: Clock | None = None
    ) -> None:
        """``seated`` returns those who hold entries of the directory now."""
        self._connect = connect
        self._seated = seated
        self._clock: Clock = clock or SystemClock()
        # Guards all below. Taken by itself and not through the condition, whose `with` is Python: an exception of a
        # signal's handler in the middle of that would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._idle: dict[str, list[_Idle]] = {}  # by node id; those that were used last at the end
        self._borrowed: set[_native.DirectoryChannel] = set()
        self._wanted: dict[str, Member] = {}
        self._opening: set[str] = set()
        self._failed: dict[str, _Failed] = {}
        self._owed: dict[
            str, list[tuple[int, float]]
        ] = {}  # leases to release by the next channel, and their ends
        self._boots: dict[str, int] = {}  # of those present, by node id
        self._openers: list[threading.Thread] = []
        self._closed = False

    def set_view(self, view: View) -> None:
        """Hang up on nodes that are gone or were restarted."""
        with self._lock:
            boots = {member.node_id: member.boot_epoch for member in view.present()}
            gone = [
                node_id
                for node_id in {*self._idle, *self._failed, *self._owed}
                if node_id not in boots or boots[node_id] != self._boots.get(node_id)
            ]
            self._boots = boots
            for node_id in gone:
                self._idle.pop(node_id, None)
                self._failed.pop(node_id, None)
                self._owed.pop(node_id, None)

    def borrow(self, members: Sequence[Member]) -> list[_native.DirectoryChannel | None]:
        """Return a channel to each; None where none is free, which is opened for the calls to come.

        Give them back with :meth:`give_back`.
        """
        with self._lock:
            channels: list[_native.DirectoryChannel | None] = []
            for member in members:
                idle = self._idle.get(member.node_id)
                if idle:
                    channel = idle.pop().channel
                    self._borrowed.add(channel)
                    channels.append(channel)
                else:
                    self._want(member)
                    channels.append(None)
            return channels

    def give_back(
        self,
        members: Sequence[Member],
        channels: Sequence[_native.DirectoryChannel],
        is_usable: Sequence[bool],
    ) -> None:
        """Keep those that can be used again; the others close."""
        with self._lock:
            self._borrowed.difference_update(channels)
            for member, channel in zip(
                compress(members, is_usable), compress(channels, is_usable), strict=True
            ):
                self._keep(member, channel)

    def release(self, member: Member, lease: int, seconds: float) -> None:
        """Tell a node that a lease of ``seconds`` is over: now, or by the next channel to it that is free.

        Waits for nothing.
        """
        with self._lock:
            (channel,) = self.borrow([member])
            if channel is not None:
                self.give_back([member], [channel], [channel.release(lease)])
                return
            now = self._clock.monotonic()
            owed = [(number, until) for number, until in self._owed.get(member.node_id, ()) if until > now]
            self._owed[member.node_id] = [*owed, (lease, now + seconds)]

    def touch(self, member: Member, keys: Keys) -> int:
        """Tell a node that its pages were read, those that are to stay longest first; waits for nothing.

        Returns of how many it was told: of none where no channel is free, or while it answers nothing.
        """
        (channel,) = self.borrow([member])
        if channel is None:
            return 0
        is_usable = False
        try:
            is_usable, n_told = channel.touch(keys)
        finally:
            self.give_back([member], [channel], [is_usable])
        return n_told

    def _keep(self, member: Member, channel: _native.DirectoryChannel) -> None:
        node_id = member.node_id
        if self._closed or self._boots.get(node_id) != member.boot_epoch:
            return
        idle = self._idle.setdefault(node_id, [])
        if len(idle) >= _MOST_IDLE or (node_id in self._owed and not self._tell_owed(node_id, channel)):
            return
        # one that answers are still to come on is taken last: the next question would wait for them
        idle.insert(0 if channel.n_late() else len(idle), _Idle(channel, self._clock.monotonic()))

    def _tell_owed(self, node_id: str, channel: _native.DirectoryChannel) -> bool:
        """Release over a free channel what could not be before; whether the channel can still be used."""
        now = self._clock.monotonic()
        return all(channel.release(lease) for lease, until in self._owed.pop(node_id, ()) if until > now)

    def close(self) -> None:
        """End calls under way, and open no more. Idempotent."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            for channel in self._borrowed:
                channel.interrupt()
            self._changed.notify_all()
            openers = list(self._openers)
        for opener in openers:
            opener.join()
        self._seated = _nobody  # what told may lead back here, and is not to wait for the garbage collector

    def _want(self, member: Member) -> None:
        failed = self._failed.get(member.node_id)
        if self._closed or member.node_id in self._opening:
            return
        if failed is not None and self._clock.monotonic() < failed.not_before:
            return
        self._wanted[member.node_id] = member
        if len(self._openers) < min(len(self._wanted), _OPENERS):
            opener = threading.Thread(target=self._open_wanted, name="p2pkv-channels", daemon=True)
            try:
                opener.start()
            except RuntimeError:
                return  # no thread is to be had now: the control socket is asked, and the next call tries once more
            self._openers.append(opener)
        self._changed.notify_all()

    def _open_wanted(self) -> None:
        while True:
            member: Member | None = None
            with self._lock:
                is_wanted = self._changed.wait_for(lambda: self._wanted or self._closed, _UNUSED_S / 2)
                if self._closed:
                    return
                if is_wanted:
                    node_id = next(iter(self._wanted))
                    member = self._wanted.pop(node_id)
                    self._opening.add(node_id)
            if member is not None:
                problem = self._open(member)
                with self._lock:
                    self._opening.discard(member.node_id)
                    self._note(member.node_id, problem)
            self._close_unused()

    def _note(self, node_id: str, problem: str | None) -> None:
        """Remember whether a channel could be opened, and complain the first time that it could not."""
        before = self._failed.pop(node_id, None)
        if problem is None or self._closed:
            return
        retry_s = _RETRY_S if before is None else min(2 * before.retry_s, _LONGEST_RETRY_S)
        self._failed[node_id] = _Failed(self._clock.monotonic() + retry_s, retry_s)
        if before is None:
            _log.warning(
                "no directory channel to %s, its shard is asked over the control socket: %s", node_id, problem
            )

    def _close_unused(self) -> None:
        now = self._clock.monotonic()
        stays = {member.node_id for member in self._seated()}
        with self._lock:
            for node_id, idle in list(self._idle.items()):
                idle[:-1] = [each for each in idle[:-1] if each.since > now - _UNUSED_S]
                if node_id not in stays and all(each.since <= now - _LAST_UNUSED_S for each in idle):
                    del self._idle[node_id]

    def _open(self, member: Member) -> str | None:
        """Open one channel; say what was in the way."""
        deadline = self._clock.monotonic() + _OPEN_S
        try:
            answer = self._connect(member, NAME, _native.DirectoryChannel.request(), deadline)
            if answer is None:
                return "no answer to the handshake"
            door, _ = answer
            left = deadline - self._clock.monotonic()
            channel = _native.DirectoryChannel.open(door, member.boot_epoch, left)
        except Exception as error:  # noqa: BLE001  # the top of a thread's loop: a broken peer is one without a channel
            return str(error)
        self.give_back([member], [channel], [True])
        return None
