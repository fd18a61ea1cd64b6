"""The toy transport with an owner that takes its time for each piece of a page: as much as a file says, at any time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "toy_transport"))

from p2pkv_toy import ToyTransport
from p2pkv_toy.memory import ToyMemoryRegion

PAUSE_FILE = "SLOW_TRANSPORT_PAUSE"
"""The environment variable that names the file, of the owner's processes."""


class SlowRegion(ToyMemoryRegion):
    """Memory that is slow to read."""

    def copy(self, offset: int, nbytes: int) -> bytes | None:
        file = os.environ.get(PAUSE_FILE)
        time.sleep(float(Path(file).read_text()) if file else 0.0)
        return super().copy(offset, nbytes)


class SlowTransport(ToyTransport):
    """Sockets whose owner is as slow as it is told."""

    name = "slow"
    domain = "slow"

    def register_memory(self, buffer: object, address: int, nbytes: int, *, readable: bool) -> SlowRegion:
        forget: Callable[[ToyMemoryRegion], None] = self._forget_region
        region = SlowRegion(buffer, address, nbytes, readable=readable, forget=forget)
        with self._lock:
            self._regions[region.id] = region
        return region


def install(folder: Path) -> dict[str, str]:
    """Make it known to processes with the environment that is returned, as pip would."""
    about = folder / "p2pkv_slow-0.1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: p2pkv-slow\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[p2pkv.transports]\nslow = slow_transport:SlowTransport\n")
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
