"""Mooncake's transfer engine over tcp: reads of registered memory, addresses known, no look-up and no proof."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it is read when the first engine is made

from mooncake.engine import TransferEngine

from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Move
from p2pkv_bench.peers import base
from p2pkv_bench.working_set import Destination, Source


def _engine(address: int, nbytes: int) -> Any:
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise BenchError("mooncake's engine does not start")
    if engine.register_memory(address, nbytes) != 0:
        raise BenchError(f"mooncake can't register {nbytes} bytes")
    return engine


class Owner(base.Owner):
    def __init__(self, source: Source, options: base.Options) -> None:
        super().__init__(source, options)
        self._engine = _engine(source.address, source.array.nbytes)

    def publish(self, page_nbytes: int, n_pages: int) -> Any:
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self.source.address

    def close(self) -> None:
        self._engine.unregister_memory(self.source.address)


class Reader(base.Reader):
    def __init__(self, destination: Destination, options: base.Options, number: int) -> None:
        super().__init__(destination, options, number)
        self._engine = _engine(destination.address, destination.array.nbytes)
        self._owner = ""
        self._remote = 0

    def meet(self, page_nbytes: int, published: Any) -> None:
        self._owner, self._remote = published

    def prepare(self, moves: Sequence[Move]) -> None:
        pass  # addresses are all it needs

    def fetch(self, move: Move) -> None:
        to = (self.destination.address + move.spans[:, 0]).tolist()
        there = (self._remote + move.spans[:, 1]).tolist()
        result = self._engine.batch_transfer_sync_read(self._owner, to, there, move.spans[:, 2].tolist())
        if result != 0:
            raise BenchError(f"a read of mooncake ended with {result}")

    def close(self) -> None:
        self._engine.unregister_memory(self.destination.address)


class Registered(base.Registered):
    """Its user's memory, which is made but not touched."""

    def __init__(self, options: base.Options) -> None:
        super().__init__(options)
        self._engine: Any = None

    def start(self, nbytes: int) -> None:
        self._memory = np.empty(nbytes, np.uint8)
        self._engine = _engine(self._memory.ctypes.data, nbytes)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.unregister_memory(self._memory.ctypes.data)
            self._engine = None
