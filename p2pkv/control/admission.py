"""Who is let in: sockets that speak CURVE, and a native ZAP handler that admits the cluster's key and no other.

The handler must be there before a server socket is: without one, nobody may be admitted.
"""

from __future__ import annotations

from typing import Any

import zmq
import zmq.backend.cython._zmq

from p2pkv import _native
from p2pkv.control.secret import ClusterKeys

_native.load_zmq(zmq.backend.cython._zmq.__file__)

_HANDSHAKE_MS = 2000
"""A connection that has not proven itself by then is dropped; ZMQ's own default is 30 s."""


class Admission:
    """The handler of one context, which has no other. Thread-safe."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ClusterKeys, domain: str) -> None:
        self._keys = keys
        self._domain = domain
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self._handler = _native.ZapHandler(self._socket, domain, [keys.public_raw])

    def guard(self, socket: zmq.Socket[Any], *, max_message: int) -> None:
        """Let only members talk to a server's socket, in messages of at most so many bytes; before it is bound."""
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

    @property
    def n_refused(self) -> int:
        """How many connections had a wrong key."""
        return self._handler.refused

    def stop(self) -> None:
        """Admit nobody any more, with or without the secret. Idempotent."""
        self._handler.stop()

    def close(self) -> None:
        """Stop, and free the handler's socket. Idempotent."""
        self.stop()
        self._socket.close()
