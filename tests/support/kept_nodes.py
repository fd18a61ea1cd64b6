"""Nodes whose pool a keeper has: what they are started with, and what they publish and find."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from p2pkv import Config, Node
from p2pkv.keeper.server import KeeperServer
from pages import fill, wrong

KEYS = [f"page-{i}" for i in range(32)]
LATER = [f"later-{i}" for i in range(320)]
NBYTES = 16 * 1024


@contextmanager
def serving(path: str) -> Iterator[KeeperServer]:
    """Have a keeper serve in a thread."""
    server = KeeperServer(path)
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            server.serve(0.01)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server
    finally:
        ending.set()
        thread.join()
        server.close()


@contextmanager
def kept_at(folder: Path) -> Iterator[str]:
    """Have a keeper serve below a folder; yields its address."""
    (folder / "keeper").mkdir(mode=0o700)
    with serving(f"{folder}/keeper/s"):
        yield f"unix:{folder}/keeper/s"


def config(keeper: str, **settings: object) -> Config:
    given = {"node_id": "host", "pool_size": "4MiB", "keeper": keeper, "deadline": 20.0} | settings
    return Config.load(given, environ={})


def publish(node: Node, keys: list[str]) -> None:
    rows = np.zeros((len(keys), NBYTES), np.uint8)
    node.register_memory(rows)
    fill(rows, keys)
    assert node.publish(keys, rows).all()


def fetch(node: Node, keys: list[str]) -> int:
    """Return how many of the pages are found; each is what it was."""
    rows = np.zeros((len(keys), NBYTES), np.uint8)
    node.register_memory(rows)
    outcomes = node.fetch(keys, rows)
    assert wrong(rows, keys, outcomes) == []
    return int(np.count_nonzero(outcomes))


def adopted(node: Node) -> float:
    return node.counters()["p2pkv_pool_adopted_pages"]
