"""Two nodes in this process, and memory to transfer between them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster import eventually
from p2pkv import Config, Node
from p2pkv.testing.lateness import returns_within
from p2pkv.transfers import RowStatus

_SERIAL = itertools.count()


def start_nodes(*names: str, **settings: Any) -> list[Node]:
    """Start nodes that know each other; names are made unique."""
    serial = next(_SERIAL)
    nodes: list[Node] = []
    for name in names:
        config = {"transports": "tcp", "pool_size": "1MiB", "deadline": 5.0, **settings}
        join = nodes[0].address if nodes else ()
        nodes.append(Node.start(Config(node_id=f"{name}{serial}", join=join, **config)))
    eventually(lambda: all(len(node.members()) == len(nodes) for node in nodes), 10.0)
    return nodes


def random_rows(n_rows: int, nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size=(n_rows, nbytes), dtype=np.uint8)


def spans_of(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Return the ``(n, 2)`` spans of the rows of a 2-dimensional array."""
    spans = np.empty((len(rows), 2), np.int64)
    spans[:, 0] = rows.ctypes.data + np.arange(len(rows), dtype=np.int64) * rows.strides[0]
    spans[:, 1] = rows[0].nbytes
    return spans


def all_are(statuses: NDArray[np.uint8], status: RowStatus, n: int = 64) -> bool:
    """Say whether there are statuses of ``n`` rows, and all of them are this one."""
    return len(statuses) == n and set(statuses.tolist()) == {int(status)}


class TransferPair:
    """A producer and a consumer, each with registered rows. Row ``i`` of ``source`` has other bytes than row ``j``."""

    def __init__(self, n_rows: int = 64, nbytes: int = 4096, **settings: Any) -> None:
        self.producer, self.consumer = start_nodes("producer", "consumer", **settings)
        self.source = random_rows(n_rows, nbytes)
        self.target = np.zeros_like(self.source)
        self.source_memory = self.producer.register_memory(self.source, readable=True)
        self.target_memory = self.consumer.register_memory(self.target)
        self._serial = itertools.count()

    def name(self) -> str:
        """Return a request name that was not used before; forget what the target holds."""
        self.target[:] = 0
        return f"request {next(self._serial)}"

    def from_rows(self, first: int = 0, n: int | None = None) -> NDArray[np.int64]:
        return spans_of(self.source)[first : None if n is None else first + n]

    def to_rows(self, first: int = 0, n: int | None = None) -> NDArray[np.int64]:
        return spans_of(self.target)[first : None if n is None else first + n]

    def is_right(self, first: int = 0, n: int | None = None) -> bool:
        part = slice(first, None if n is None else first + n)
        return bool(np.array_equal(self.source[part], self.target[part]))

    def is_refused_at_once(self, request: str) -> bool:
        """Ask for what is over, with a deadline that is far away."""
        refused = self.producer.counters()["p2pkv_gone_asks_total"]
        with returns_within(0.5):
            got = self.consumer.transfers.get(self.producer.node_id, request, self.to_rows(), timeout=60.0)
        assert self.producer.counters()["p2pkv_gone_asks_total"] == refused + 1
        return all_are(got, RowStatus.GONE, len(self.target))

    def counter(self, name: str) -> float:
        return self.consumer.counters()[name]

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()
