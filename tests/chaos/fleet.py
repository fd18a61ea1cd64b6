"""The fleet of whole nodes: each is a process with a pool, a part of the directory and an engine's load.

Nodes 0 and 1 share a place, so that they read each other over shm; every other node has a place of its own. Every odd
node has a disk: a small tmpfs that can be filled, below a pool that holds three quarters of its pages.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from contextlib import ExitStack
from pathlib import Path

from .contents import NBYTES
from .load import DEADLINE_S, N_PAGES
from .namespaces import Network
from .processes import Processes

_JOIN_PORT = 7400
_DISK = "24m"


class Fleet(Processes):
    """``n`` nodes; each is started, signalled, told and ended by its number."""

    def __init__(self, n: int, seed: int, network: Network, folder: Path) -> None:
        super().__init__([f"n{number}" for number in range(n)], seed, network, folder)
        # with one address only, everything is met that can befall the node which holds it
        self._join_places = (0, 1) if seed % 2 == 0 else (1,)
        self._secret = folder / "secret"
        self._undo = ExitStack()
        self._secret.touch(mode=0o600)
        self._secret.write_text(secrets.token_hex(32))
        for number in range(n):
            if self.has_disk(number):
                self._mount(self.disk(number))

    def _mount(self, path: Path) -> None:
        path.mkdir(mode=0o700)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_DISK},mode=700", "tmpfs", str(path)], check=True
        )
        self._undo.callback(subprocess.run, ["umount", "--lazy", str(path)], check=False)

    def has_disk(self, number: int) -> bool:
        return number % 2 == 1

    def disk(self, number: int) -> Path:
        """Return the folder that a node's disk is mounted at."""
        return self.folder / f"disk-n{number}"

    def place(self, number: int) -> int:
        return max(0, number - 1)

    def _role(self, number: int) -> dict[str, object]:
        name, network = self.names[number], self.network
        config: dict[str, object] = {
            "node_id": name,
            "listen": f"{network.address(self.place(number))}:0",
            "join": [f"{network.address(place)}:{_JOIN_PORT}" for place in self._join_places],
            "secret_file": str(self._secret),
            "transports": ["shm", "tcp"],
            "pool_size": 8 << 20,
            "buffer_size": "4MiB",
            "deadline": DEADLINE_S,
        }
        if self.has_disk(number):
            disk = {"disk_path": str(self.disk(number) / "store"), "disk_size": "16MiB"}
            config |= disk | {"pool_size": N_PAGES * NBYTES * 3 // 4}
        return {"role": "node", "config": config}

    def fill_disk(self, number: int) -> None:
        """Take all that is free on a node's disk."""
        room = os.statvfs(self.disk(number))
        try:
            with open(self._ballast(number), "wb", buffering=0) as file:
                while file.write(bytes(min(1 << 20, max(4096, room.f_bavail * room.f_bsize)))):
                    pass
        except OSError:
            return  # ENOSPC: that is what was wanted

    def empty_disk(self, number: int) -> None:
        """Give back what :meth:`fill_disk` took."""
        self._ballast(number).unlink(missing_ok=True)

    def _ballast(self, number: int) -> Path:
        return self.disk(number) / "ballast"

    def close(self) -> None:
        super().close()
        self._undo.close()
