"""The node of a host as a process of its own, to which real engines attach."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import eventually
from demo.xpyd.real_engines import ROOT, lasting_port


class HostsNode:
    """``p2pkv node``, with room for what a test publishes.

    ``attach`` is the path at which it listens; engines with ``environment`` find it by ``auto`` as well.
    """

    def __init__(self, folder: Path, pool_size: str) -> None:
        users = folder / "run"
        users.mkdir(mode=0o700)
        self.environment = {"XDG_RUNTIME_DIR": str(users)}
        self._metrics_port = lasting_port()
        settings = {
            "node_id": "host",
            "listen": f"127.0.0.1:{lasting_port()}",
            "pool_size": pool_size,
            "attach_listen": "auto",
            "metrics_port": str(self._metrics_port),
        }
        told = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        with (folder / "host.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "p2pkv", "node", *told],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment,
                cwd=ROOT,
            )
        eventually(lambda: list(users.glob("p2pkv/host-*")), 60.0)
        (path,) = users.glob("p2pkv/host-*")
        self.attach = f"unix:{path}"

    def counters(self) -> dict[str, float]:
        """Return what it counts, without labels summed."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def end(self) -> None:
        """End it. Idempotent."""
        self._process.kill()
        self._process.wait()


@contextmanager
def hosts_node(folder: Path, *, pool_size: str = "64MiB") -> Iterator[HostsNode]:
    """Have one run."""
    node = HostsNode(folder, pool_size)
    try:
        yield node
    finally:
        node.end()
