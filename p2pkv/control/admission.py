"""Who is let in: sockets that speak CURVE, and a native ZAP handler that admits the cluster's key and no other.

The handler must be there before a server socket is: without one, nobody may be admitted.
"""

from __future__ import annotations

from typing import Any

import zmq
import zmq.backend.cython._zmq

from p2pkv import _native
from p2pkv.control.secret import ClusterKeys
from p2pkv.control.strangers import StrangersLog

_native.load_zmq(zmq.backend.cython._zmq.__file__)

_HANDSHAKE_MS = 2000
"""A connection that has not proven itself by then is dropped; ZMQ's own default is 30 s."""


_MONITOR = "inproc://p2pkv.handshakes"


class Admission:
    """The handler of one context, which has no other, and the one server's socket that it guards. Thread-safe.

    Whoever is refused is counted, and said in the log once a minute at most.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ClusterKeys, domain: str) -> None:
        self._keys = keys
        self._domain = domain
        self._context = context
        self._refusals = _native.Refusals()
        self._log: StrangersLog | None = None
        self._monitor: _native.HandshakeMonitor | None = None
        self._guarded: zmq.Socket[Any] | None = None
        self._socket = context.socket(zmq.ROUTER)
        self._events = context.socket(zmq.PAIR)
        self._socket.linger = self._events.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self._handler = _native.ZapHandler(self._socket, domain, [keys.public_raw], self._refusals)

    def guard(self, socket: zmq.Socket[Any], *, max_message: int) -> None:
        """Let only members talk to a server's socket, in messages of at most so many bytes; before it is bound.

        The socket is closed by :meth:`close`, since its monitor must end before it.
        """
        assert self._guarded is None, "one handler guards one socket"
        self._guarded = socket
        socket.linger = 0
        socket.curve_server = True
        socket.curve_secretkey = self._keys.private
        socket.curve_publickey = self._keys.public
        socket.setsockopt_string(zmq.ZAP_DOMAIN, self._domain)
        # Without this a stranger who knows the server's key is admitted while no handler answers.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.setsockopt(zmq.IPV6, 1)
        socket.monitor(_MONITOR, _native.HandshakeMonitor.EVENTS)
        self._events.rcvhwm = 0  # a full queue would block ZMQ's own thread
        self._events.connect(_MONITOR)
        self._monitor = _native.HandshakeMonitor(self._events, self._refusals)
        self._log = StrangersLog(self._refusals)

    @property
    def n_refused(self) -> int:
        """How many connections had a wrong key, or none."""
        return self._refusals.count

    def stop(self) -> None:
        """Admit nobody any more, with or without the secret. Idempotent."""
        self._handler.stop()

    def close(self) -> None:
        """Stop, and free the guarded socket, which nobody uses any more, and the handler's. Idempotent."""
        self.stop()
        if self._guarded is not None and not self._guarded.closed:
            # in this order: an event for a monitor that nobody has the other end of would block ZMQ's own thread
            self._guarded.monitor(None, 0)
            self._guarded.close()
        if self._monitor is not None:
            self._monitor.stop()
        self._events.close()
        self._socket.close()
        if self._log is not None:
            self._log.close()
