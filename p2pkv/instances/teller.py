"""Telling a router something, as far as it lets itself be told: a PUSH socket to its heartbeat address, under CURVE."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from p2pkv.address import split_address
from p2pkv.control.secret import ClusterKeys
from p2pkv.control.silence import tell_why_silent

_log = logging.getLogger(__name__)

_SILENT_S = 5.0
"""After which it is said that a router takes nothing; a restart takes less."""
_REPEAT_S = 60.0
"""Until the same is said again of the same router."""
_LINGER_MS = 200
"""For a good-bye to go out."""
_OTHER_SECRET_MS = 1000
"""Between two knocks at a router that may go by several secrets: by all but one of them it refuses us for ever."""
_MOST_QUEUED = 64
"""Messages for a router that does not read: what comes after them is not sent."""


class Teller:
    """One router that is told. Used by one thread at a time; nothing here waits."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: ClusterKeys, *, who: str
    ) -> None:
        """Connect to ``address``. ``who``: what the log calls whoever is told of there.

        Raises :class:`~p2pkv.errors.ConfigError` for what is no address.
        """
        host, port = split_address("router", address)
        self.address = address
        self.who = who
        self.is_connected = False
        """Whether it took the last message."""
        self._complain_at = time.monotonic() + _SILENT_S
        self._socket = context.socket(zmq.PUSH)
        # Nothing waits for a router that is not there: one that comes back wants the newest report, not the missed
        # ones. (CONFLATE would do that too, but lose the good-bye when the socket is closed behind it.)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, _MOST_QUEUED)
        self._socket.linger = _LINGER_MS
        self._socket.setsockopt(zmq.IPV6, 1)
        if keys.accepted:
            self._socket.reconnect_ivl = _OTHER_SECRET_MS
        # The router goes by one of them; what is sent goes where we have been let in.
        for pair in keys.all:
            self._socket.curve_serverkey = pair.public
            self._socket.curve_publickey = pair.public
            self._socket.curve_secretkey = pair.private
            self._socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")

    def send(self, message: bytes, *, on_first: Callable[[], None] | None = None) -> bool:
        """Send it if the router has let us in; whether it has. ``on_first`` is called if it had not before."""
        try:
            self._socket.send(message, zmq.DONTWAIT)
        except zmq.Again:
            self._silent()
            return False
        if not self.is_connected:
            self.is_connected = True
            if on_first is not None:
                on_first()
        return True

    def _silent(self) -> None:
        now = time.monotonic()
        if self.is_connected:
            self.is_connected = False
            self._complain_at = now + _SILENT_S
        if now >= self._complain_at:
            self._complain_at = now + _REPEAT_S
            who, address = self.who, self.address
            tell_why_silent(
                address,
                lambda why: _log.warning(
                    "%s is not announced: the router at %s takes no heartbeats: %s", who, address, why
                ),
            )

    def close(self) -> None:
        """Hang up; what was sent last may still go out."""
        self._socket.close()
