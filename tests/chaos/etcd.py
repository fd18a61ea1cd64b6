"""An etcd of one member at a place of its own, which is killed, and started again with what it had on disk."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from .namespaces import Network

_CLIENTS, _PEERS = 2379, 2380
_READY_S = 30.0


def unavailable() -> str | None:
    """Return why no etcd can be started here, None if one can."""
    if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
        return "no etcd is there; `tools/system-packages python3 etcd` installs Debian's"
    return None


class Etcd:
    """One member; while it is dead nobody can write a record, renew a lease or hear of a newcomer."""

    def __init__(self, network: Network, place: int, folder: Path) -> None:
        self._network, self._place, self._folder = network, place, folder
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"{network.address(place)}:{_CLIENTS}"
        self.start()
        self._await_ready()

    def start(self) -> None:
        """Start it, again if it was killed. Idempotent."""
        if self._process is not None:
            return
        peers = f"http://127.0.0.1:{_PEERS}"
        flags = {
            "name": "m0",
            "data-dir": str(self._folder / "etcd"),
            "listen-client-urls": f"http://{self.address}",
            "advertise-client-urls": f"http://{self.address}",
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"m0={peers}",
            "heartbeat-interval": "50",
            "election-timeout": "500",
            "log-level": "error",
        }
        command = ["etcd", "--unsafe-no-fsync", *(f"--{name}={value}" for name, value in flags.items())]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._network.inside(self._place), *command], stdout=log, stderr=log
            )

    def kill(self) -> None:
        """End it at once, with SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _await_ready(self) -> None:
        command = ["etcdctl", f"--endpoints=http://{self.address}", "endpoint", "health"]
        until = time.monotonic() + _READY_S
        while subprocess.run([*self._network.inside(self._place), *command], capture_output=True).returncode:
            if time.monotonic() > until:
                raise TimeoutError(f"etcd is not ready after {_READY_S:g} s; see {self._folder / 'etcd.log'}")
