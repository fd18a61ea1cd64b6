"""A producer and a consumer of rows in one process, with memory of the emulated driver's devices on both sides."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_buffers import EmulatedBuffer, VirtualBuffer
from fake_cuda import fake_cuda
from p2pkv import Node, _native
from transfer_pair import random_rows, start_nodes

N, NBYTES = 64, 16384


class Ends:
    """Their memory is of a kind that the process can map itself, unless ``kind`` is another."""

    def __init__(self, kind: type[EmulatedBuffer] = VirtualBuffer, **settings: Any) -> None:
        """``settings`` are those of both nodes, whose transports they name."""
        settings = {"cuda_library": fake_cuda().path, "device_staging_size": 256 << 10} | settings
        _native.cuda_use_library(fake_cuda().path)
        self.buffers = [kind(N * NBYTES), kind(N * NBYTES)]
        self.producer, self.consumer = start_nodes("producer", "consumer", **settings)
        self.source = self.producer.register_memory(self.buffers[0].array, readable=True)
        self.target = self.consumer.register_memory(self.buffers[1].array)
        self._before = (0.0, 0.0, 0.0)

    def meet(self) -> None:
        """Hand all rows over once, which stages those that are asked for before the ways are known; then count anew."""
        self.hand_over("before", 1)
        self._before = self.went()

    def rows(self, side: int) -> NDArray[np.int64]:
        spans = np.full((N, 2), NBYTES, np.int64)
        spans[:, 0] = self.buffers[side].address + np.arange(N) * NBYTES
        return spans

    def fill(self, seed: int) -> NDArray[np.uint8]:
        data = random_rows(N, NBYTES, seed)
        self.buffers[0].write(data)
        return data

    def hand_over(self, request: str, seed: int) -> None:
        """Put all rows into a grant, and look at every byte."""
        expected = self.fill(seed)
        with self.consumer.transfers.grant(request, self.rows(1)) as grant:
            put = self.producer.transfers.put(self.consumer.node_id, request, self.rows(0))
            assert not put.any(), put
            assert not grant.wait(5.0).any()
        assert np.array_equal(self.buffers[1].read().reshape(N, NBYTES), expected)

    def hand_over_behind_kernels(self) -> None:
        """Put all rows while a kernel has yet to write them, and again while one may still write to their places."""
        for side, request in enumerate(("the producer's", "the receiver's")):
            stream = self.buffers[side].fill_later(0x5A + side)
            streams = [stream, None] if side == 0 else [None, stream]
            transfers = self.producer.transfers
            with self.consumer.transfers.grant(request, self.rows(1), stream=streams[1]) as grant:
                put = transfers.put(self.consumer.node_id, request, self.rows(0), stream=streams[0])
                assert not put.any()
                assert not grant.wait(5.0).any()
            assert (self.buffers[1].read() == 0x5A).all()

    def count(self, node: Node, name: str) -> float:
        return node.counters()[f"p2pkv_{name}"]

    def went(self) -> tuple[float, float, float]:
        """Bytes that went directly, and those that were staged on either side, since both ends met."""
        counts = (
            self.count(self.consumer, "direct_bytes_total"),
            self.count(self.producer, "staged_to_host_bytes_total"),
            self.count(self.consumer, "staged_to_device_bytes_total"),
        )
        direct, to_host, to_device = (now - then for now, then in zip(counts, self._before, strict=True))
        return direct, to_host, to_device

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()
        for buffer in self.buffers:
            buffer.close()
