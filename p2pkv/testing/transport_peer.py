"""A process that owns readable memory, for contract tests to read from, stop and kill.

Run as ``python -m p2pkv.testing.transport_peer FACTORY``, or forked by a nursery, with FACTORY as ``module:callable``
returning a Transport. See :class:`PeerProcess`.

The region holds a table of words and then pages; every 8 bytes of a page equal its word, so that a page's
reader can tell whether its bytes belong together.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from p2pkv._native import SharedRegion
from p2pkv.testing.nursery import Nursery, nursery
from p2pkv.testing.processes import ChildProcess, obey
from p2pkv.transports.base import MemoryRegion, Spans, Transport, Words

PAGE = 256 * 1024
N_PAGES = 16
TABLE = 4096
NBYTES = TABLE + N_PAGES * PAGE
_PROGRAM = "p2pkv.testing.transport_peer"
_PATIENCE_S = 120.0
"""For an answer: an emulated machine may take half a minute to import p2pkv."""


class PagedMemory:
    """Readable memory of :data:`N_PAGES` pages with their words, as an owner holds it."""

    def __init__(self, transport: Transport) -> None:
        self.shared = SharedRegion.create(NBYTES)
        self.bytes = self.shared.array
        self.words = self.bytes[: 8 * N_PAGES].view(np.uint64)
        self._pages = self.bytes[TABLE:].view(np.uint64).reshape(N_PAGES, PAGE // 8)
        for page in range(N_PAGES):
            self.rewrite(page, 2)
        self.region: MemoryRegion = transport.register_memory(
            self.shared, self.shared.address, self.shared.nbytes, readable=True
        )

    def close(self) -> None:
        """Close the region and let go of the memory."""
        self.region.close()
        del self.bytes, self.words, self._pages, self.shared

    def rewrite(self, page: int, word: int) -> None:
        """Give a page other bytes, in the order that generation words ask for."""
        self.words[page] = word - 1
        self._pages[page] = word
        self.words[page] = word


def page_spans(pages: list[int]) -> Spans:
    """Return spans that read ``pages``, one behind the other, to the start of the local region."""
    local = np.arange(len(pages), dtype=np.int64) * PAGE
    remote = TABLE + np.array(pages, np.int64) * PAGE
    return np.stack([local, remote, np.full(len(pages), PAGE, np.int64)], axis=1)


def page_words(pages: list[int], values: list[int]) -> Words:
    """Return the words that ``pages`` must have."""
    return np.stack([np.array(pages, np.uint64) * np.uint64(8), np.array(values, np.uint64)], axis=1)


def load_factory(name: str) -> Callable[[], Transport]:
    """Return the callable that ``module:callable`` names."""
    module, _, attribute = name.partition(":")
    factory: Callable[[], Transport] = getattr(importlib.import_module(module), attribute)
    return factory


class PeerProcess(ChildProcess):
    """The owner, seen from the test that started it."""

    def __init__(self, factory: str) -> None:
        super().__init__(
            [sys.executable, "-m", _PROGRAM, factory], name="the peer process", popen=self.nursery().popen
        )
        greeting = self._ask("greet")
        self.domain: str = greeting["domain"]
        self.region: bytes = bytes.fromhex(greeting["region"])

    @staticmethod
    def nursery() -> Nursery:
        """Return what forks all of them; the first call starts it."""
        return nursery(_PROGRAM)

    def accept(self, half: bytes) -> bytes:
        """Have the owner accept a reader's half of a handshake; returns the owner's."""
        return bytes.fromhex(self._ask("accept", half=half.hex()))

    def churn(self, pause: float) -> None:
        """Have the owner rewrite its pages over and over, from now on, with a pause of so many seconds between two."""
        self._ask("churn", pause=pause)

    def usage(self) -> dict[str, int]:
        """Return the owner's numbers of descriptors, threads and mappings, and its resident bytes."""
        counts: dict[str, int] = self._ask("usage")
        return counts

    def _ask(self, command: str, **arguments: object) -> Any:
        self.send(command, **arguments)
        return self.answer(_PATIENCE_S)


class _Owner:
    """The process itself; its methods are the commands."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._memory = PagedMemory(transport)

    def greet(self) -> dict[str, str]:
        return {"domain": self._transport.domain, "region": self._memory.region.describe().hex()}

    def accept(self, half: str) -> str:
        return self._transport.accept(bytes.fromhex(half)).hex()

    def churn(self, pause: float) -> None:
        threading.Thread(target=self._churn, args=(pause,), name="p2pkv-churn", daemon=True).start()

    def _churn(self, pause: float) -> None:
        word = 2
        while True:
            word += 2
            for page in range(N_PAGES):
                self._memory.rewrite(page, word)
                time.sleep(pause)

    def usage(self) -> dict[str, int]:
        return usage()


def usage() -> dict[str, int]:
    """Return this process's numbers of descriptors, threads and mappings, and its resident bytes."""
    with open("/proc/self/statm") as statm, open("/proc/self/maps") as maps:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        n_maps = sum(1 for _ in maps)
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": n_maps,
        "resident": resident,
    }


def main() -> None:
    """Be the owner."""
    obey(_Owner(load_factory(sys.argv[1])()))


if __name__ == "__main__":
    main()
