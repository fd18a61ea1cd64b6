"""Client threads that all ask one shard: three look-ups of 128 keys, a publish of 32 small pages, and so on."""

from __future__ import annotations

import time
from functools import partial
from itertools import chain

import numpy as np

from p2pkv.node import Node
from p2pkv_bench.keys import keys_at
from p2pkv_bench.rounds import timed

LOOK_UP_KEYS = 128
PUBLISH_PAGES = 32
_PAGE_NBYTES = 64
_PUBLISHES = 64
"""Batches of keys a thread; when it has published them all it takes them back and begins again."""


class Load:
    """Some threads of one process, with the keys and the memory they need."""

    def __init__(self, node: Node, shard: str, n_threads: int) -> None:
        self._node = node
        self._n_threads = n_threads
        memory = np.arange(PUBLISH_PAGES * _PAGE_NBYTES, dtype=np.uint8)
        self._pages = memory.reshape(PUBLISH_PAGES, _PAGE_NBYTES)
        self._memory = node.register_memory(memory)
        n_own = _PUBLISHES * PUBLISH_PAGES * n_threads
        self._look_up = keys_at(node, shard, "load", LOOK_UP_KEYS)
        own = keys_at(node, shard, f"load-{node.node_id}", n_own)
        self._own = [own[i : i + PUBLISH_PAGES] for i in range(0, n_own, PUBLISH_PAGES)]

    def run(self, seconds: float) -> dict[str, list[float]]:
        """Ask for so long; return the seconds of each look-up and of each publish."""
        look_ups: list[list[float]] = [[] for _ in range(self._n_threads)]
        publishes: list[list[float]] = [[] for _ in range(self._n_threads)]

        def ask(index: int) -> None:
            batches = self._own[index * _PUBLISHES : (index + 1) * _PUBLISHES]
            until = time.perf_counter() + seconds
            turn = 0
            while (began := time.perf_counter()) < until:
                turn += 1
                if turn % 4:
                    self._node.exists(self._look_up)
                    look_ups[index].append(time.perf_counter() - began)
                    continue
                batch = batches[turn // 4 % _PUBLISHES]
                self._node.publish(batch, self._pages)
                publishes[index].append(time.perf_counter() - began)
                self._node.retract(batch)

        timed([[partial(ask, index)] for index in range(self._n_threads)])
        return {"look_ups": list(chain(*look_ups)), "publishes": list(chain(*publishes))}
