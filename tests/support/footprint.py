"""What a process holds, seen from outside: memory, descriptors, threads, shared-memory segments, open doors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"
_ACCEPTS = 0x10000  # __SO_ACCEPTCON in /proc/net/unix


@dataclass(frozen=True, slots=True)
class Footprint:
    """Counts, and the resident memory in bytes."""

    rss: int
    n_fds: int
    n_threads: int
    n_segments: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        proc = Path(f"/proc/{pid}")
        pages = int((proc / "statm").read_text().split()[1])
        return cls(
            rss=pages * os.sysconf("SC_PAGESIZE"),
            n_fds=len(os.listdir(proc / "fd")),
            n_threads=len(os.listdir(proc / "task")),
            n_segments=sum("/memfd:" in line for line in (proc / "maps").read_text().splitlines()),
        )

    def is_as_flat_as(self, before: Footprint, *, rss: int) -> bool:
        """Whether nothing has grown but for ``rss`` bytes of memory."""
        return (
            self.n_fds <= before.n_fds
            and self.n_threads <= before.n_threads
            and self.n_segments <= before.n_segments
            and self.rss <= before.rss + rss
        )


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue  # closed since it was listed
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def tcp_ports(pid: int) -> list[int]:
    """Return the TCP ports a process listens on."""
    own = _socket_inodes(pid)
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in own:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def abstract_sockets(pid: int) -> list[str]:
    """Return the names, without the leading zero byte, of the abstract Unix sockets a process listens on."""
    own = _socket_inodes(pid)
    names = []
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if (
            len(fields) > 7
            and int(fields[3], 16) & _ACCEPTS
            and fields[6] in own
            and fields[7].startswith("@")
        ):
            names.append(fields[7][1:])
    return sorted(names)
