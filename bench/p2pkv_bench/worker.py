"""The other process: a node with pages to fetch, and the far ends of the references. See :mod:`p2pkv_bench.peer`."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from typing import Any

import numpy as np

from p2pkv.config import Config
from p2pkv.node import Node
from p2pkv.page import as_bytes
from p2pkv.pool import Pool
from p2pkv.testing.processes import obey
from p2pkv.transports.base import MemoryRegion, Transport
from p2pkv_bench import bare
from p2pkv_bench._native import serve_spans
from p2pkv_bench.echo import EchoServer
from p2pkv_bench.keys import keys_at
from p2pkv_bench.load import Load
from p2pkv_bench.reads import Reads
from p2pkv_bench.transfer_ends import FarTransfers
from p2pkv_bench.working_set import Rotation, Source

_BATCH_NBYTES = 8 << 20


class Worker:
    """Its methods are the commands."""

    def __init__(self) -> None:
        self._node: Node | None = None
        self._source: Source | None = None
        self._bare: dict[str, tuple[Transport, MemoryRegion]] = {}
        self._echo: EchoServer | None = None
        self._load: Load | None = None
        self._transfers: FarTransfers | None = None
        self._reads: Reads | None = None
        self._n_keys = 0

    def start(self, config: dict[str, Any], working_set: int, readable: bool = False) -> str:
        """Start a node; with ``working_set`` bytes of pages that can be published, or with ``readable`` transferred."""
        self._node = Node.start(Config.load(config, environ={}))
        if working_set:
            self._source = Source(working_set)
            self._source.register(self._node, readable=readable)
            if readable:
                self._transfers = FarTransfers(self._node, self._source, working_set)
        return self._node.address

    def wait_for(self, n_members: int) -> None:
        """Wait until the node sees so many members."""
        until = time.monotonic() + 20
        while len(self.node.members()) < n_members and time.monotonic() < until:
            time.sleep(0.02)

    @property
    def node(self) -> Node:
        assert self._node is not None
        return self._node

    @property
    def source(self) -> Source:
        assert self._source is not None
        return self._source

    def publish(
        self, page_nbytes: int, prefix: str, shard: str, n_pages: int = 0, is_paced: bool = False
    ) -> int:
        """Publish all pages of one size under keys of one shard; the pool must have room for them.

        Or the disk has it, which is waited for if ``is_paced``.
        """
        pages = self.source.pages(page_nbytes)
        pages = pages[: n_pages or len(pages)]
        keys = keys_at(self.node, shard, prefix, len(pages))
        step = max(1, min(1024, _BATCH_NBYTES // page_nbytes))
        n_published = 0
        for first in range(0, len(keys), step):
            part = slice(first, first + step)
            n_published += int(self.node.publish(keys[part], pages[part]).sum())
            while is_paced and self.node.counters()["p2pkv_disk_queued_bytes"]:
                time.sleep(0.001)
        return n_published

    def publish_for(self, seconds: float, page_nbytes: int, batch: int) -> int:
        """Publish pages under keys that nobody has had, for so long; returns how many bytes were published."""
        pages = self.source.pages(page_nbytes)
        rotation = Rotation(len(pages))
        n_published, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            first = rotation.take(batch)
            keys = [f"{self.node.node_id}-{self._n_keys + i}" for i in range(batch)]
            self._n_keys += batch
            n_published += int(self.node.publish(keys, pages[first : first + batch]).sum())
        return n_published * page_nbytes

    def prepare_reads(self, page_nbytes: int, prefix: str, shard: str, n_pages: int) -> None:
        """Prepare to read the pages that another process has published so."""
        keys = keys_at(self.node, shard, prefix, n_pages)
        self._reads = Reads(self.node, keys, self.source.pages(page_nbytes)[:n_pages])

    def read_for(self, seconds: float, batch: int, may_miss: bool = False) -> dict[str, Any]:
        """Read them over and over for so long; see :meth:`Reads.run`."""
        assert self._reads is not None
        return self._reads.run(seconds, batch, may_miss=may_miss)

    def processor_seconds(self) -> float:
        """Return how long processors have worked for this process."""
        return time.process_time()

    def serve_streams(self) -> int:
        """Accept streams and send them what they ask for; returns the port."""
        listener = socket.create_server(("127.0.0.1", 0))
        source = self.source

        def serve(stream: socket.socket) -> None:
            with stream:
                serve_spans(stream.fileno(), source.address, source.array.nbytes)

        def accept() -> None:
            while True:
                stream, _ = listener.accept()
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=serve, args=(stream,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        port: int = listener.getsockname()[1]
        return port

    def serve_echo(self) -> tuple[str, str]:
        """Start a bare echo; returns its address and its public key."""
        self._echo = EchoServer()
        return self._echo.address, self._echo.public

    def serve_pool(self, transports: list[str], page_nbytes: int, locations: str) -> dict[str, str]:
        """Make a pool without a node around it; writes where its pages lie, returns a region in hex a transport."""
        pages = self.source.pages(page_nbytes)
        pool = Pool(self.source.array.nbytes * 5 // 4, owner=1, boot=1)
        for name in transports:
            transport = bare.start(name)
            region = transport.register_memory(pool, pool.address, pool.nbytes, readable=True)
            self._bare[name] = (transport, region)  # which keeps the pool
        keys = np.zeros((len(pages), 16), np.uint8)
        keys.view(np.uint64)[:, 0] = np.arange(len(pages))
        pieces = np.empty((len(pages), 1, 2), np.int64)
        pieces[:, 0, 0] = pages.ctypes.data + np.arange(len(pages)) * page_nbytes
        pieces[:, 0, 1] = page_nbytes
        _, where, *_ = pool.publish(keys, pieces)
        np.save(locations, as_bytes(where))
        return {name: region.describe().hex() for name, (_, region) in self._bare.items()}

    def accept(self, transport: str, half: str) -> str:
        """Answer a handshake for :meth:`serve_pool`."""
        return self._bare[transport][0].accept(bytes.fromhex(half)).hex()

    def drop_pool(self) -> None:
        """End :meth:`serve_pool`."""
        for transport, _ in self._bare.values():
            transport.close()
        self._bare.clear()

    def hold_gil(self, seconds: float) -> None:
        """Sleep without letting any other Python code of this process run."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def offer(self, calls: list[tuple[str, int, int]], page_nbytes: int) -> None:
        """Offer pages for gets: a request, first page and number of pages each."""
        assert self._transfers is not None
        self._transfers.offer(calls, page_nbytes)

    def grant(self, calls: list[tuple[str, int, int]], page_nbytes: int) -> None:
        """Grant slots for puts: a request, first slot and number of pages each."""
        assert self._transfers is not None
        self._transfers.grant(calls, page_nbytes)

    def verify_grants(self, pages: list[int], page_nbytes: int) -> bool:
        """Say whether the grants got exactly the pages, of which the first of each grant is given, and end them."""
        assert self._transfers is not None
        return self._transfers.verify(pages, page_nbytes)

    def prepare_load(self, shard: str, n_threads: int) -> None:
        """Make threads that will ask ``shard``."""
        self._load = Load(self.node, shard, n_threads)

    def load(self, seconds: float) -> dict[str, list[float]]:
        """Let them ask; returns the seconds that each of their calls took."""
        assert self._load is not None
        return self._load.run(seconds)

    def close(self) -> None:
        if self._echo is not None:
            self._echo.close()
        if self._node is not None:
            self._node.close()


def main() -> None:
    """Do what stdin says until it ends."""
    worker = Worker()
    obey(worker)
    worker.close()


if __name__ == "__main__":
    main()
