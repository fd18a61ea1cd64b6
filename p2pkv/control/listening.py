"""Binding ``listen``, which processes of one host may have in common with each other and with ``join``.

The first of them has it, or one that found it free as a join address and took it: then the others listen on ports of
their own, and meet through that one.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from p2pkv.address import reachable_host, split_address
from p2pkv.control.host_names import Names
from p2pkv.control.silence import why_silent
from p2pkv.errors import ControlError

_log = logging.getLogger(__name__)

_STARTS_S = 5.0
"""How long the port's holder may take until it answers as a member: it may be in the middle of its own start."""

IsPeer = Callable[[str], bool]
"""Whether a node with our secret answers at an address; blocks for a moment."""


def bind(socket: zmq.Socket[Any], listen: str, join: Sequence[str], *, names: Names, is_peer: IsPeer) -> str:
    """Bind ``listen`` and return the address that peers reach it by, ``HOST:PORT``.

    A port that a node of the same cluster has, and that is a join address too, is left to it, and another one taken.
    Blocks for five seconds at most while its holder does not answer. Raises :class:`ControlError`, saying who has the
    port, and :class:`ConfigError` if it can't be told how peers would reach this node.
    """
    host, port = split_address("listen", listen)
    bracketed = f"[{host}]" if ":" in host else host
    public = reachable_host(host, join)
    if ":" in public:
        public = f"[{public}]"
    until = time.monotonic() + _STARTS_S
    while True:
        try:
            socket.bind(f"tcp://{bracketed}:{port or '*'}")
            break
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise ControlError(f"cannot listen on {listen}: {os.strerror(error.errno or 0)}") from error
            held = f"{public}:{port}"
            if not is_common(held, join, names):
                raise ControlError(
                    f"cannot listen on {listen}: {os.strerror(error.errno or 0)}; {_holder(held, is_peer)}"
                ) from error
            if is_peer(held):
                _log.warning(
                    "%s, which is both listen and a join address, is another node's of this host: this node listens on "
                    "a free port instead; a listen with port 0 says so from the beginning",
                    listen,
                )
                port = 0
            elif time.monotonic() >= until:
                raise ControlError(
                    f"cannot listen on {listen}: {os.strerror(error.errno or 0)}; {_holder(held, is_peer)}"
                ) from error
    return f"{public}:{socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(':')[2]}"


def is_common(held: str, join: Sequence[str], names: Names) -> bool:
    """Whether an address that somebody has is a join address too, so that a node of the same host may have taken it."""
    ours = set(names.numbers(held))
    return any(not ours.isdisjoint(names.numbers(address)) for address in join)


def _holder(held: str, is_peer: IsPeer) -> str:
    if is_peer(held):
        return "a node of this cluster has it; take another port, or 0 for any"
    return f"another process has it: {why_silent(held)}"
