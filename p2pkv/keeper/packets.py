"""What nodes and the keeper's process say to each other: a packet of a verb and a name, and two descriptors with some.

===================  =====================================================================
to the keeper        its answer
===================  =====================================================================
``1 GIVE NAME``      ``KEPT`` with the descriptors of region and records, or ``NONE``
``1 KEEP NAME``      ``KEPT``; brings both descriptors, instead of what had that name
``1 DROP NAME``      ``NONE``
anything else        ``REFUSED`` and why
===================  =====================================================================

The number is the version. A name has at most 64 letters, digits and dashes.
"""

from __future__ import annotations

import re
import socket
import struct

from p2pkv.keeper.memory import PoolMemory

LONGEST = 512
"""Bytes of a packet."""
_REQUEST = re.compile(r"1 (GIVE|KEEP|DROP) ([A-Za-z0-9-]{1,64})")

_CREDENTIALS = struct.Struct("3i")


def user_of(other: socket.socket) -> int:
    """Return whose process is at the other end: the one that listened, or that connected."""
    _, user, _ = _CREDENTIALS.unpack(
        other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(user)


def send(to: socket.socket, text: str, memory: PoolMemory | None = None) -> None:
    """Send one packet."""
    socket.send_fds(to, [text.encode()], [] if memory is None else list(memory))


def receive(connection: socket.socket) -> tuple[str, list[int]]:
    """Receive one packet and its descriptors, which are the caller's; empty when the other end has gone."""
    data, fds, _, _ = socket.recv_fds(connection, LONGEST, 2, socket.MSG_CMSG_CLOEXEC)
    return data.decode("ascii", "replace"), list(fds)


def read_request(text: str) -> tuple[str, str] | None:
    """Return the verb and the name of a request; None if it is none of this version."""
    match = _REQUEST.fullmatch(text)
    return None if match is None else (match[1], match[2])
