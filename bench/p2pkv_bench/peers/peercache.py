"""PeerCache over its tcp fall-back, location cache on, asked for each page once before the clock starts.

Its authors mean the fall-back for trying things out; without an RDMA device there is nothing else of it to measure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peercache.discovery import DiscoveryServer
from peercache.store import PeerCacheStore

from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Move
from p2pkv_bench.peers import base
from p2pkv_bench.rows import MIB
from p2pkv_bench.working_set import Destination, Source, n_pages_of

_SIZES_KEPT = 4
"""It keeps the pages of every size: what it evicts it may still claim to have, and then a fetch fails."""

logging.getLogger("peercache").setLevel(logging.ERROR)


class _HostPool:
    """An array as the host memory of an engine: page ``i`` is row ``i``."""

    def __init__(self, array: NDArray[np.uint8], page_nbytes: int) -> None:
        self.kv_buffer = SimpleNamespace(
            data_ptr=lambda: array.ctypes.data, numel=lambda: array.nbytes, element_size=lambda: 1
        )
        self._address = array.ctypes.data
        self._page_nbytes = page_nbytes

    def get_page_buffer_meta(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        first, nbytes = self._address, self._page_nbytes
        return [first + i * nbytes for i in indices], [nbytes] * len(indices)


def _store(discovery: str, node_id: str, pool_nbytes: int) -> Any:
    settings = {
        "discovery_addr": discovery,
        "protocol": "tcp",
        "local_hostname": "127.0.0.1",
        "control_bind_host": "127.0.0.1",
        "rdma_bind_host": "127.0.0.1",
        "node_id": node_id,
        "heartbeat_interval": 0.2,
        "member_ttl": 30.0,
        "global_segment_size": pool_nbytes,
        "directory_read_cache_ttl": 60.0,
        "metrics_enabled": False,
        "disk_enabled": False,
    }
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    return PeerCacheStore(SimpleNamespace(is_mla_model=True, extra_config=settings, **ranks))


def _keys(page_nbytes: int, pages: range) -> list[str]:
    return [f"{page_nbytes}-{page}" for page in pages]


class Owner(base.Owner):
    def __init__(self, source: Source, options: base.Options) -> None:
        super().__init__(source, options)
        self._discovery = DiscoveryServer("127.0.0.1", 0)
        self._address = f"127.0.0.1:{self._discovery.start()}"
        self._store = _store(self._address, "owner", source.array.nbytes * _SIZES_KEPT)

    def publish(self, page_nbytes: int, n_pages: int) -> Any:
        self._store.register_mem_pool_host(_HostPool(self.source.array, page_nbytes))
        for first in range(0, n_pages, 64):
            pages = range(first, min(first + 64, n_pages))
            if not all(self._store.batch_set_v1(_keys(page_nbytes, pages), list(pages))):
                raise BenchError("peercache did not take all pages")
        return self._address

    def close(self) -> None:
        self._store.close()
        self._discovery.stop()


class Reader(base.Reader):
    def __init__(self, destination: Destination, options: base.Options, number: int) -> None:
        super().__init__(destination, options, number)
        self._store: Any = None
        self._page_nbytes = 0

    def meet(self, page_nbytes: int, published: Any) -> None:
        self._page_nbytes = page_nbytes
        if self._store is None:
            self._store = _store(published, f"reader-{self.number}", 64 << 20)
            until = time.monotonic() + 15
            while len(self._store.runtime.ring) < 2 and time.monotonic() < until:
                time.sleep(0.05)
        n_pages = n_pages_of(self.destination.array.nbytes, page_nbytes)
        array = self.destination.array[: n_pages * page_nbytes]
        self._store.register_mem_pool_host(_HostPool(array, page_nbytes))

    def prepare(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._store.batch_exists(_keys(self._page_nbytes, range(move.page, move.page + move.batch)))

    def fetch(self, move: Move) -> None:
        keys = _keys(self._page_nbytes, range(move.page, move.page + move.batch))
        slots = (move.spans[:, 0] // self._page_nbytes).tolist()
        if not all(self._store.batch_get_v1(keys, slots)):
            raise BenchError("peercache did not bring all pages")

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class Pool(base.Pool):
    def __init__(self, options: base.Options) -> None:
        super().__init__(options)
        self._discovery = DiscoveryServer("127.0.0.1", 0)
        self._address = f"127.0.0.1:{self._discovery.start()}"
        self._store: Any = None

    def start(self, nbytes: int) -> None:
        self._store = _store(self._address, "alone", nbytes)
        # its pool is made when an engine's memory is registered
        self._first = np.zeros(MIB, np.uint8)
        self._store.register_mem_pool_host(_HostPool(self._first, MIB))

    def use(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._store.register_mem_pool_host(_HostPool(memory.reshape(-1), memory.shape[1]))

    def put(self, keys: Sequence[str]) -> None:
        self._store.batch_set_v1(list(keys), list(range(len(keys))))

    def get(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        return np.array(self._store.batch_get_v1(list(keys), list(range(len(keys)))), dtype=bool)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._discovery.stop()
