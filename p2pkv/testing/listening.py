"""Find the sockets this process listens on and knock at them, as a stranger would."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

_LISTENING_TCP = "0A"
_ACCEPTS_CONNECTIONS = 0x10000


@dataclass(frozen=True, slots=True)
class Address:
    """Where to knock."""

    family: socket.AddressFamily
    kind: socket.SocketKind
    where: str | tuple[str, int]
    """A path or an abstract name, or a numeric address and a port."""


def addresses() -> list[Address]:
    """Return every address this process listens on."""
    inodes = _own_inodes()
    return [
        *_tcp_addresses(inodes, "tcp", socket.AF_INET),
        *_tcp_addresses(inodes, "tcp6", socket.AF_INET6),
        *_unix_addresses(inodes),
    ]


def connect(address: Address) -> socket.socket:
    """Connect to one of them."""
    stranger = socket.socket(address.family, address.kind)
    stranger.settimeout(60)
    stranger.connect(address.where)
    return stranger


def send(stranger: socket.socket, data: bytes) -> None:
    """Send as much of ``data`` as the server takes; it may well have hung up before."""
    try:
        stranger.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        return


def _own_inodes() -> set[str]:
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # closed meanwhile: the directory listing's own, at least
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def _tcp_addresses(inodes: set[str], table: str, family: socket.AddressFamily) -> list[Address]:
    path = Path("/proc/self/net") / table
    found = []
    for line in path.read_text().splitlines()[1:] if path.exists() else []:  # a machine may have no IPv6
        fields = line.split()
        if fields[3] == _LISTENING_TCP and fields[9] in inodes:
            host, port = fields[1].split(":")
            # words of four bytes, each as the processor has it
            words = (int(host[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(host), 8))
            where = (socket.inet_ntop(family, b"".join(words)), int(port, 16))
            found.append(Address(family, socket.SOCK_STREAM, where))
    return found


def _unix_addresses(inodes: set[str]) -> list[Address]:
    found = []
    with open("/proc/self/net/unix") as table:
        for line in table.readlines()[1:]:
            fields = line.split()
            if len(fields) == 8 and fields[6] in inodes and int(fields[3], 16) & _ACCEPTS_CONNECTIONS:
                name = fields[7].replace("@", "\0", 1)
                found.append(Address(socket.AF_UNIX, socket.SocketKind(int(fields[4], 16)), name))
    return found
