"""p2pkv by itself: a node with a pool. What it moves between processes is measured with the nodes of a pair."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from p2pkv.node import Node
from p2pkv_bench.peer import Meeting
from p2pkv_bench.peers import base


class Pool(base.Pool):
    def __init__(self, options: base.Options) -> None:
        super().__init__(options)
        self._meeting = Meeting()
        self._started: Node | None = None

    @property
    def _node(self) -> Node:
        assert self._started is not None
        return self._started

    def start(self, nbytes: int) -> None:
        self._started = self._meeting.start("alone", pool_size=nbytes, transports=["shm"], **self.options)

    def use(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._registered = self._node.register_memory(memory)

    def put(self, keys: Sequence[str]) -> None:
        self._node.publish(list(keys), self._memory[: len(keys)])

    def get(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        outcomes = self._node.fetch(list(keys), self._memory[: len(keys)])
        return np.asarray(outcomes, dtype=bool)

    def close(self) -> None:
        if self._started is not None:
            self._started.close()
        self._meeting.close()
