"""Two nodes in one process, and threads that use them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import pages
from cluster import eventually
from p2pkv import Config, Node
from p2pkv.testing.ports import free_port
from p2pkv.transports.base import Transport

N, NBYTES = 8, 4096
POOL = 1 << 20


class Pair:
    """Two nodes, ``owner`` and ``reader``, each with registered memory for ``N`` pages.

    An ``attached`` owner is an engine, and ``host`` the node whose pool it uses; else they are one.
    """

    def __init__(
        self,
        folder: Path,
        extra: Callable[[], list[Transport]] = list,
        *,
        attached: bool = False,
        **settings: object,
    ) -> None:
        secret = folder / "secret"
        secret.write_text("the secret of a test, long enough\n")
        secret.chmod(0o600)
        settings = {
            "secret_file": str(secret),
            "join": [f"127.0.0.1:{free_port()}"],
            "pool_size": POOL,
            "deadline": 5.0,  # of which a healthy peer takes none, but a busy machine may
        } | settings
        if attached:
            (folder / "host").mkdir(mode=0o700, exist_ok=True)
            path = f"unix:{folder}/host/s"
            self.host = self.start("host", extra, settings | {"attach_listen": path})
            self.owner = self.start("owner", extra, settings | {"attach": path})
        else:
            self.host = self.owner = self.start("owner", extra, settings)
        self.reader = self.start("reader", extra, settings)
        self.source = np.zeros((N, NBYTES), np.uint8)
        self.destination = np.zeros((N, NBYTES), np.uint8)
        self.owner.register_memory(self.source)
        self.reader.register_memory(self.destination)
        eventually(lambda: all(len(node.members()) == 2 for node in self.nodes), 10.0)
        self._counter = 0

    @staticmethod
    def start(node_id: str, extra: Callable[[], list[Transport]], settings: dict[str, object]) -> Node:
        config = Config.load(settings | {"node_id": node_id}, environ={})
        return Node.start(config, extra_transports=extra())

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.owner, self.reader, *([self.host] if self.host is not self.owner else [])

    def fresh_keys(self) -> list[str]:
        self._counter += 1
        return [f"{self._counter}-{i}" for i in range(N)]

    def publish(self) -> list[str]:
        keys = self.fresh_keys()
        pages.fill(self.source, keys)
        assert self.owner.publish(keys, self.source).all()
        return keys

    def fetch_is_right(self, keys: list[str]) -> bool:
        """Whether the reader gets every page; a wrong byte is an error at once."""
        self.destination[:] = 0
        outcomes = self.reader.fetch(keys, self.destination)
        assert pages.wrong(self.destination, keys, outcomes) == []
        if not outcomes.all():
            print(
                outcomes, {k: v for k, v in self.reader.counters().items() if "missed" in k or "silent" in k}
            )
        return bool(outcomes.all())

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def run_all(bodies: list[Callable[[], None]], seconds: float = 60.0) -> None:
    """Run each in a thread of its own; raise the first error of any."""
    errors: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
        assert not thread.is_alive(), "a call hangs"
    if errors:
        raise errors[0]
