"""Heartbeats of instances: a socket that only holders of the cluster's secret can talk to."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Protocol

import zmq
import zmq.asyncio

from p2pkv.address import is_loopback, split_address
from p2pkv.control.admission import Admission
from p2pkv.control.secret import ClusterKeys
from p2pkv.errors import ConfigError, ControlError
from p2pkv.instances.heartbeat import MAX_BYTES, Heartbeat, unpack
from p2pkv_proxy.replicas import Replicas
from p2pkv_proxy.shared_load import unpack as unpack_load

_log = logging.getLogger(__name__)

_ZAP_DOMAIN = "p2pkv-proxy"
_MOST_UNUSABLE_LOGGED = 20
_MOST_A_TURN = 16
"""Heartbeats taken in one turn of the loop, a millisecond's work: that of a thousand instances waits for no turn."""


class Listener(Protocol):
    """Who is told of heartbeats: a registry, or the parent of several workers."""

    refused: int
    strangers: Callable[[], int]
    replicas: Replicas | None
    """The routers beside this one, which speak to the same address."""

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Take one that was admitted and read."""


class Discovery:
    """Takes heartbeats to a listener. :meth:`run` must run; close it afterwards."""

    def __init__(self, listen: str, keys: ClusterKeys, listener: Listener, *, has_own_secret: bool) -> None:
        """Bind ``listen``. ``has_own_secret``: it is nobody else's, so only this host may come."""
        self._listener = listener
        host, port = split_address("--listen", listen)
        if not has_own_secret or is_loopback(host):
            bracketed = f"[{host}]" if ":" in host else host
        else:
            raise ConfigError(f"without --secret-file heartbeats are taken on loopback only, not on {listen}")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._admission = Admission(self._context, keys, _ZAP_DOMAIN)
        listener.strangers = lambda: self._admission.n_refused
        self._socket = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.PULL)
        self._admission.guard(self._socket, max_message=MAX_BYTES)
        try:
            self._socket.bind(f"tcp://{bracketed}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ControlError(
                f"cannot take heartbeats on {listen}: {os.strerror(error.errno or 0)}; "
                "--heartbeats takes another address"
            ) from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = f"{bracketed}:{bound.rpartition(':')[2]}"
        """``HOST:PORT`` where heartbeats go."""

    async def run(self) -> None:
        """Take heartbeats, for ever."""
        n_taken = n_unusable = 0
        while True:
            frames = await self._socket.recv_multipart()
            try:
                self._take(b"".join(frames))
            except (ControlError, ConfigError) as error:
                self._listener.refused += 1
                n_unusable += 1
                if n_unusable <= _MOST_UNUSABLE_LOGGED:
                    _log.warning("a heartbeat was not taken: %s", error)
            n_taken += 1
            if n_taken % _MOST_A_TURN == 0:  # what is there already is received without a turn of the loop
                await asyncio.sleep(0)

    def _take(self, message: bytes) -> None:
        load = unpack_load(message)
        replicas = self._listener.replicas
        if load is None:
            heartbeat = unpack(message)
            self._listener.note_heartbeat(heartbeat)
            if replicas is not None:
                replicas.found(heartbeat.routers)
                replicas.pass_on(message, heartbeat.routers)
        elif replicas is not None and replicas.note(load) and load.beat:
            self._listener.note_heartbeat(unpack(load.beat))

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._admission.close()
        self._context.term()
