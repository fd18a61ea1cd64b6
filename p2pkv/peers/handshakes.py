"""Handshakes between nodes: each side's half of a connection travels over the authenticated control plane.

The native control loop answers for transports of the native core and for the directory's channels; those of
transports written in Python are answered by a thread here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from p2pkv import _native
from p2pkv.control.sockets import ControlClient, Request
from p2pkv.control.wire import (
    Kind,
    ReplyStatus,
    pack_connect,
    pack_connected,
    unpack_connect,
    unpack_connected,
)
from p2pkv.directory.view import Member
from p2pkv.errors import ControlError, P2PKVError, TransportError
from p2pkv.limited_log import LimitedLog
from p2pkv.transports.base import Transport

_log = logging.getLogger(__name__)

_TAKE_S = 60.0
"""How long the accepting thread sleeps at most when nobody comes; closing wakes it."""


class Handshakes:
    """Both sides of them. Thread-safe."""

    def __init__(self, client: ControlClient, loop: _native.ControlLoop | None = None) -> None:
        """``loop`` is what answers others; who is no member has none, and only asks."""
        self._client = client
        self._loop = loop
        self._log = LimitedLog(_log)
        self._transports: dict[str, Transport] = {}
        self._regions: Mapping[str, bytes] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def connect(self, member: Member, name: str, half: bytes, deadline: float) -> tuple[bytes, bytes] | None:
        """Hand our half of a connection over ``name`` to a peer.

        Returns the peer's half and the description of its pool's region; None if there was no answer by
        ``deadline``, or a refusal, which is logged. Raises :class:`~p2pkv.errors.TransportError` for an answer that
        can't be used.
        """
        request = Request(member.address, Kind.CONNECT, pack_connect(name, half), boot=member.boot_epoch)
        reply = self._client.ask(request, max(0.0, deadline - time.monotonic()))
        if reply is None:
            return None
        if not reply.ok:
            self._log.warning(
                (member.node_id, name),
                "peer %s refused a connection over %s: %s",
                member.node_id,
                name,
                reply.body.decode(errors="replace") or f"it answered {reply.status.name}",
            )
            return None
        try:
            return unpack_connected(reply.body)
        except ControlError as error:
            raise TransportError(f"peer {member.node_id}: {error}") from error

    def serve(self, transports: Sequence[Transport], regions: Mapping[str, bytes]) -> None:
        """Let peers in from now on; ``regions`` has the pool's description for each transport, by name."""
        assert self._loop is not None, "who is no member serves nobody"
        self._transports = {transport.name: transport for transport in transports}
        self._regions = regions
        for name, transport in self._transports.items():
            self._loop.serve(name, transport.native, regions[name])
        if any(transport.native is None for transport in transports):
            self._thread = threading.Thread(
                target=self._accept, args=(self._loop,), name="p2pkv-accept", daemon=True
            )
            self._thread.start()

    def _accept(self, loop: _native.ControlLoop) -> None:
        while not self._closing.is_set():
            event = loop.take(Kind.CONNECT, _TAKE_S)
            if event is None:
                continue
            route, body = event
            name, half = unpack_connect(body)
            try:
                answer = pack_connected(self._transports[name].accept(half), self._regions[name])
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop: the next reader is let in
                if not isinstance(error, P2PKVError):
                    self._log.error(name, "transport %s failed at a reader's handshake", name, exc_info=error)
                loop.reply(route, ReplyStatus.REFUSED, str(error).encode(errors="replace"))
            else:
                loop.reply(route, ReplyStatus.OK, answer)

    def close(self) -> None:
        """Answer no more; waits for the thread. Idempotent."""
        self._closing.set()
        if self._loop is not None:
            self._loop.wake(Kind.CONNECT)
        if self._thread is not None:
            self._thread.join()
