"""The processes of the hunts of attached engines.

A host's node, a member of another host, an engine that is killed, and one that publishes without end.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_buffers import EmulatedBuffer
from fake_cuda import fake_cuda, has_fake_cuda
from p2pkv import Config, Node, SharedRegion
from p2pkv.keeper.server import KeeperServer
from p2pkv.testing.nursery import nursery
from p2pkv.testing.processes import ChildEndedError, ChildProcess, obey, say

_PROGRAM = str(Path(__file__).resolve())
VICTIM_PAGES, VICTIM_NBYTES = 8, 16384
GREEDY_PAGES = 8
_GREEDY_THREADS = 3
_NEVER_S = 86400.0
"""Of ``directory_check``: what an owner of entries was not told of is not looked for, so somebody has to say it."""


def child(role: str, *arguments: str) -> ChildProcess:
    """Start one; it says a line when it is ready."""
    words = [sys.executable, _PROGRAM, role, *arguments]
    return ChildProcess(words, name=role, popen=nursery(_PROGRAM).popen)


def rows_of(memory: NDArray[np.uint8], n: int, nbytes: int) -> NDArray[np.uint64]:
    return memory[: n * nbytes].view(np.uint64).reshape(n, -1)


def victim_keys(name: str, batch: int) -> tuple[list[str], list[int]]:
    """Return the keys of a batch of the engine that is killed, and the number that each page is made of."""
    values = [batch * VICTIM_PAGES + i + 1 for i in range(VICTIM_PAGES)]
    return [f"{name}-{value}" for value in values], values


def greedy_keys(name: str, batch: int) -> tuple[list[str], list[int]]:
    """Return the keys of a batch of an engine without measure, and the number that each page is made of."""
    values = [batch * GREEDY_PAGES + i + 1 for i in range(GREEDY_PAGES)]
    return [f"{name}-{value}" for value in values], values


def greedy_size(batch: int, sizes: list[int]) -> int:
    """Return how many bytes each page of this batch has."""
    return sizes[batch // 2 % len(sizes)]


def lines_left(ended: ChildProcess, timeout: float) -> list[int]:
    """Return the numbers that it had said before it ended; its output ends within ``timeout`` seconds."""
    numbers = []
    while True:
        try:
            numbers.append(int(ended.read(timeout)))
        except ChildEndedError:
            return numbers


class Other:
    """A member of another host, which does what stdin says."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._memory = np.zeros(VICTIM_PAGES * VICTIM_NBYTES, np.uint8)
        node.register_memory(self._memory)

    def fetch(self, keys: list[str]) -> dict[str, list[int]]:
        """Return the numbers that each page is made of that is found."""
        rows = rows_of(self._memory, len(keys), VICTIM_NBYTES)
        outcomes = self._node.fetch(keys, rows.view(np.uint8), timeout=5.0)
        pages = zip(keys, rows, outcomes, strict=True)
        return {key: np.unique(row)[:4].tolist() for key, row, outcome in pages if outcome}

    def bump(self) -> None:
        """Take everything back, whoever of the members does not hear of it."""
        self._node.bump(timeout=1.0)


def be_host(path: str, join: str, keeper: str = "", disk: str = "") -> None:
    """Be the node until stdin ends."""
    config = Config(
        node_id="host",
        attach_listen=path,
        join=[join],
        pool_size="256MiB",
        replicas=1,
        directory_check=_NEVER_S,
        keeper=keeper,
        disk_path=disk or None,
        disk_size="64MiB" if disk else 0,
    )
    with Node.start(config) as node:
        say(int(node.counters().get("p2pkv_pool_adopted_pages", 0)))
        sys.stdin.read()


def be_keeper(path: str) -> None:
    """Keep the node's memory until killed."""
    server = KeeperServer(path)
    say("ready")
    while True:
        server.serve()


def be_other() -> None:
    """Be the member of another host until stdin ends; the first answer is its address."""
    with Node.start(Config(node_id="other", pool_size="4MiB", replicas=1)) as node:
        say({"result": node.address})
        obey(Other(node))


def device_settings(staging: str) -> dict[str, Any]:
    """Return what an engine with memory of the emulated device has beside."""
    return {"cuda_library": fake_cuda().path, "device_staging_size": staging} if has_fake_cuda() else {}


def be_victim(name: str, path: str, memory: str = "host") -> None:
    """Publish batch after batch until killed, and say the number of each one that is published whole.

    From ``memory`` of the host, or of a device that is slow to copy.
    """
    settings = device_settings("128KiB")  # a batch takes four rounds
    with Node.start(Config(node_id=name, attach=path, replicas=1, **settings)) as node:
        region = SharedRegion.create(VICTIM_PAGES * VICTIM_NBYTES)
        node.register_address(region.address, region.nbytes, region)
        rows = rows_of(region.array, VICTIM_PAGES, VICTIM_NBYTES)
        device = EmulatedBuffer(region.nbytes) if memory == "device" else None
        if device is not None:
            node.register_memory(device.array)
            fake_cuda().delay_copies(200)
        say("ready")
        for batch in range(1 << 30):
            keys, values = victim_keys(name, batch)
            rows[:] = np.array(values, np.uint64)[:, None]
            pages: Any = rows.view(np.uint8)
            if device is not None:
                device.write(pages)
                pages = device.rows(VICTIM_PAGES, VICTIM_NBYTES)
            while not node.publish(keys, pages, timeout=30.0).all():
                pass
            say(batch)


def be_greedy(node_id: str, name: str, path: str, *nbytes: str) -> None:
    """Publish from several threads until killed; the first says the number of each batch that is published whole.

    Keys begin with ``name``; pages have these sizes by turns.
    """
    sizes = [int(size) for size in nbytes]
    with Node.start(Config(node_id=node_id, attach=path, replicas=1)) as node:

        def publish(of: str, tell: bool) -> None:
            region = SharedRegion.create(GREEDY_PAGES * max(sizes))
            node.register_address(region.address, region.nbytes, region)
            for batch in range(1 << 30):
                keys, values = greedy_keys(of, batch)
                rows = rows_of(region.array, GREEDY_PAGES, greedy_size(batch, sizes))
                rows[:] = np.array(values, np.uint64)[:, None]
                if node.publish(keys, rows.view(np.uint8), timeout=30.0).all() and tell:
                    say(batch)

        for i in range(1, _GREEDY_THREADS):
            threading.Thread(target=publish, args=(f"{name}-{i}", False), daemon=True).start()
        publish(name, tell=True)


def main() -> None:
    """Be who the arguments say."""
    role, *arguments = sys.argv[1:]
    if role == "host":
        be_host(*arguments)
    elif role == "other":
        be_other()
    elif role == "greedy":
        be_greedy(*arguments)
    elif role == "keeper":
        be_keeper(*arguments)
    else:
        be_victim(role, *arguments)


if __name__ == "__main__":
    main()
