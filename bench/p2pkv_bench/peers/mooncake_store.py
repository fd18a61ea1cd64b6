"""Mooncake Store over tcp: a master says where a key's object is, and the store brings it to registered memory.

The master is the program in Mooncake's wheel, as it is without options, but for ports that the system chooses and for
listening on loopback alone. Objects lie in the segment of the process that has put them.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it is read when the first engine is made

from mooncake.store import MooncakeDistributedStore

from p2pkv.testing.ports import free_port
from p2pkv.testing.processes import ChildEndedError, ChildProcess
from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Move
from p2pkv_bench.peers import base
from p2pkv_bench.rows import MIB
from p2pkv_bench.working_set import Destination, Source

_LOCAL_BUFFER = 64 * MIB
_PATIENCE_S = 15.0
_BATCH_NBYTES = 32 * MIB
_WITH_ITS_PARENT = (
    "import ctypes, os, signal, sys;"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL);"  # PR_SET_PDEATHSIG
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Runs a program that ends when this process does, however that ends: the master does not read its stdin."""


class _Master:
    """The process that knows where objects are."""

    def __init__(self) -> None:
        self._port, metrics_port = free_port(), free_port()
        program = str(resources.files("mooncake") / "mooncake_master")
        os.chmod(program, 0o755)  # wheels lose that, and Mooncake's own starter mends it so
        self._process = ChildProcess(
            [
                *(sys.executable, "-c", _WITH_ITS_PARENT, program),
                *("--rpc_address=127.0.0.1", f"--rpc_port={self._port}"),
                *("--metrics_host=127.0.0.1", f"--metrics_port={metrics_port}"),
            ],
            name="mooncake_master",
            keeps_errors=True,
        )
        self.address = f"127.0.0.1:{self._port}"
        until = time.monotonic() + _PATIENCE_S
        while not self._listens():
            if time.monotonic() > until:
                raise BenchError(f"mooncake_master does not listen within {_PATIENCE_S:g} s")

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1.0):
            return True
        try:
            with suppress(TimeoutError):
                self._process.read(0.02)  # it says nothing there, but this tells whether it has ended
        except ChildEndedError as error:
            raise BenchError(str(error).splitlines()[-1]) from error
        return False

    def close(self) -> None:
        self._process.kill()
        self._process.close()


def _store(master: str, segment_nbytes: int) -> Any:
    store = MooncakeDistributedStore()
    result = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_nbytes, _LOCAL_BUFFER, "tcp", "", master)
    if result != 0:
        raise BenchError(f"mooncake's store does not start: {result}")
    return store


def _register(store: Any, address: int, nbytes: int) -> None:
    result = store.register_buffer(address, nbytes)
    if result != 0:
        raise BenchError(f"mooncake's store can't register {nbytes} bytes: {result}")


def _keys(page_nbytes: int, pages: range) -> list[str]:
    return [f"{page_nbytes}-{page}" for page in pages]


class Owner(base.Owner):
    def __init__(self, source: Source, options: base.Options) -> None:
        super().__init__(source, options)
        self._master = _Master()
        # a quarter more than the pages: it evicts from nine tenths of its segment on
        self._store = _store(self._master.address, source.array.nbytes * 5 // 4)
        _register(self._store, source.address, source.array.nbytes)

    def publish(self, page_nbytes: int, n_pages: int) -> Any:
        self._store.remove_all(True)
        step = max(1, _BATCH_NBYTES // page_nbytes)
        for first in range(0, n_pages, step):
            pages = range(first, min(first + step, n_pages))
            addresses = [self.source.address + page * page_nbytes for page in pages]
            results = self._store.batch_put_from(
                _keys(page_nbytes, pages), addresses, [page_nbytes] * len(pages)
            )
            if any(results):
                raise BenchError(f"mooncake's store did not take all pages: {min(results)}")
        return self._master.address

    def close(self) -> None:
        self._store.close()
        self._master.close()


class Reader(base.Reader):
    def __init__(self, destination: Destination, options: base.Options, number: int) -> None:
        super().__init__(destination, options, number)
        self._store: Any = None
        self._page_nbytes = 0

    def meet(self, page_nbytes: int, published: Any) -> None:
        self._page_nbytes = page_nbytes
        if self._store is None:
            self._store = _store(published, 0)
            _register(self._store, self.destination.address, self.destination.array.nbytes)

    def prepare(self, moves: Sequence[Move]) -> None:
        pass  # it caches no look-ups: each call asks the master

    def fetch(self, move: Move) -> None:
        keys = _keys(self._page_nbytes, range(move.page, move.page + move.batch))
        to = (self.destination.address + move.spans[:, 0]).tolist()
        results = self._store.batch_get_into(keys, to, move.spans[:, 2].tolist())
        if any(result != self._page_nbytes for result in results):
            raise BenchError(f"mooncake's store did not bring all pages: {min(results)}")

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class Pool(base.Pool):
    def __init__(self, options: base.Options) -> None:
        super().__init__(options)
        self._master = _Master()
        self._store: Any = None

    def start(self, nbytes: int) -> None:
        self._store = _store(self._master.address, nbytes)

    def use(self, memory: NDArray[np.uint8]) -> None:
        self._addresses = [row.ctypes.data for row in memory]
        self._page_nbytes = memory.shape[1]
        _register(self._store, memory.ctypes.data, memory.nbytes)

    def put(self, keys: Sequence[str]) -> None:
        self._store.batch_put_from(*self._arguments(keys))

    def get(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        results: list[int] = self._store.batch_get_into(*self._arguments(keys))
        return np.array([result == self._page_nbytes for result in results])

    def _arguments(self, keys: Sequence[str]) -> tuple[list[str], list[int], list[int]]:
        return list(keys), self._addresses[: len(keys)], [self._page_nbytes] * len(keys)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._master.close()
