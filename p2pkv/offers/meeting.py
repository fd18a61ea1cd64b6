"""Reaching a peer that offers go to or come from: whether it is there, and its first connection.

A peer may be on its way: news of one that has just started takes about a second, and a verdict of death may be taken
back. It is waited for once, by all callers together: those of a dead peer, however many, must not have all the threads
of an engine until their deadlines.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from p2pkv import _native
from p2pkv.directory.view import Member, View, node_key
from p2pkv.errors import ClosedError, TransportError
from p2pkv.limited_log import LimitedLog

_log = logging.getLogger(__name__)

NAME = "transfers"
"""What CONNECT asks for; no transport may be called so."""
DEATH_GRACE_S = 3.0
"""How long a verdict of death must stand until it costs transfers anything. One that a busy machine has brought about
is taken back by the node itself, which hears of it within a second or two. A node that is not there, or not reached,
is waited for as long."""
_PAUSE_S = 0.1
"""Before a peer that could not be connected to is tried again: a guess."""
_MAX_AWAITED = 1024
"""Peers; what an engine is handed comes from outside and may name any."""

Connect = Callable[[Member, str, bytes, float], "tuple[bytes, bytes] | None"]
"""``(member, name, our half, deadline)`` to the peer's half; None: no answer, or refused."""


class _Awaited(NamedTuple):
    """What several calls may be waiting for."""

    node_id: str
    boot_epoch: int | None
    is_there: bool
    """Whether it is a member, and only not connected."""


class Meeting:
    """Thread-safe."""

    def __init__(
        self,
        native: _native.Transfers,
        connect: Connect,
        view: Callable[[], View],
        *,
        grace: float = DEATH_GRACE_S,
    ) -> None:
        """Connect ``native`` through ``connect`` to members of ``view``; ``grace``: seconds, as the constant says."""
        self._native, self._connect, self._view, self._grace = native, connect, view, grace
        self._log = LimitedLog(_log)
        # guards what follows; never held while the view is asked for, whose owner calls with locks of its own
        self._changed = threading.Condition()
        self._n_changes = 0
        self._is_closed = False
        self._until: dict[_Awaited, float] = {}
        # Each member has one, which is held while it is connected to.
        self._connecting: dict[str, threading.Lock] = {}

    def meet(self, node_id: str, boot_epoch: int | None, deadline: float) -> bool:
        """Wait until a node is a member, and until it is connected; return whether it is a member."""
        while True:
            with self._changed:
                seen, is_closed = self._n_changes, self._is_closed
            member = self._view().get(node_id)
            is_there = member is not None and member.is_present and boot_epoch in (None, member.boot_epoch)
            if is_there and self._native.is_connected(node_key(node_id)):
                self._forget(node_id, boot_epoch)
                return True
            if (
                not is_there
                and member is not None
                and boot_epoch is not None
                and member.boot_epoch > boot_epoch
            ):
                return False
            until = min(deadline, self._patience(_Awaited(node_id, boot_epoch, is_there)))
            if is_closed or time.monotonic() >= until:
                return is_there
            if is_there and self._native.is_connected(self.reach(node_id, until)):
                continue
            # one that is there and was not reached may be in a moment, without any news of it
            self._wait_for_news(seen, min(until, time.monotonic() + _PAUSE_S) if is_there else until)

    def _patience(self, awaited: _Awaited) -> float:
        """Return until when a node is waited for, by whoever asks."""
        with self._changed:
            if len(self._until) >= _MAX_AWAITED and awaited not in self._until:
                self._until.clear()
            return self._until.setdefault(awaited, time.monotonic() + self._grace)

    def _forget(self, node_id: str, boot_epoch: int | None) -> None:
        with self._changed:
            for is_there in (False, True):
                self._until.pop(_Awaited(node_id, boot_epoch, is_there), None)

    def _wait_for_news(self, seen: int, until: float) -> None:
        with self._changed:
            left = max(0.0, until - time.monotonic())
            self._changed.wait_for(lambda: self._is_closed or self._n_changes != seen, left)

    def view_changed(self, view: View) -> None:
        """Have those who wait look again; whoever is there is waited for anew when it is gone again."""
        with self._changed:
            self._n_changes += 1
            for awaited in list(self._until):
                member = view.get(awaited.node_id)
                if member is not None and member.is_present and not awaited.is_there:
                    del self._until[awaited]
            for node_id in self._connecting.keys() - view.keys():
                del self._connecting[node_id]
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def n_remembered(self) -> int:
        """How many nodes something is kept of that were connected to."""
        with self._changed:
            return len(self._connecting)

    def reach(self, node_id: str, deadline: float) -> int:
        """Connect to a node if it is not yet, and return its key; what it is asked for is lost if that fails."""
        key = node_key(node_id)
        if self._native.is_connected(key):
            return key
        if node_id not in self._view():
            _log.info("no member %s to transfer with", node_id)
            return key
        with self._changed:
            connecting = self._connecting.setdefault(node_id, threading.Lock())
        if not connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return key
        try:
            if not self._native.is_connected(key):
                self._open(node_id, key, deadline)
        finally:
            connecting.release()
        return key

    def _open(self, node_id: str, key: int, deadline: float) -> None:
        member = self._view().get(node_id)
        if member is None or not member.is_present:
            _log.info("no member %s to transfer with", node_id)
            return
        try:
            answer = self._connect(member, NAME, _native.Transfers.request(), deadline)
            if answer is not None:
                door, _ = answer
                self._native.connect(key, member.boot_epoch, door, max(0.0, deadline - time.monotonic()))
        except (ClosedError, TransportError, RuntimeError) as error:
            self._log.warning(node_id, "cannot connect to %s for transfers: %s", node_id, error)
