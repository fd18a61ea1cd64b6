"""Sends the same requests to real nodes, with real bytes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from p2pkv.config import Config
from p2pkv.errors import P2PKVError
from p2pkv.node import Node
from p2pkv.parts.cache import CacheParts
from p2pkv_bench.replay.run import Size
from p2pkv_bench.replay.simulation import Tier

_SOURCES = {"own_pool": Tier.OWN_MEMORY, "disk": Tier.OWN_DISK}
"""As nodes count what they fetch; all others are transports, over which a peer's memory and its disk look alike."""
_COUNTED = 'p2pkv_fetched_pages_total{source="'
_TIMEOUT = 30.0
"""Seconds for a call: what is to be compared is what is found, not how fast."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


class WrongBytesError(P2PKVError):
    """A page that was found is not the one that was published."""


class _Engine(NamedTuple):
    node: Node
    pages: NDArray[np.uint64]
    """Registered; where an engine has its KV."""


class LiveCluster:
    """Nodes of this process, each with a pool and, with ``disk_pages``, a disk for as many pages as ``size`` says.

    A page is ``page_nbytes`` long and made of its own name; what is fetched is compared. Use it as a context manager.
    """

    def __init__(self, size: Size, page_nbytes: int, longest: int) -> None:
        self._size = size
        self._page_nbytes = page_nbytes
        self._longest = longest
        self._engines: list[_Engine] = []
        self._ending = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as starting:
            folder = Path(starting.enter_context(tempfile.TemporaryDirectory(prefix="p2pkv-replay-")))
            join: tuple[str, ...] = ()
            for i in range(self._size.n_nodes):
                node = starting.enter_context(Node.start(self._config(i, join, folder)))
                join = join or (node.address,)
                pages = np.zeros((self._longest, self._page_nbytes // 8), np.uint64)
                node.register_memory(pages)
                self._engines.append(_Engine(node, pages))
            self._ending = starting.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ending.close()

    def _config(self, i: int, join: tuple[str, ...], folder: Path) -> Config:
        disk: dict[str, Any] = {}
        if self._size.disk_pages:
            disk = {
                "disk_size": self._size.disk_pages * self._page_nbytes,
                "disk_path": str(folder / f"disk-{i}"),
            }
        return Config(
            node_id=f"replay-{i}",
            join=join,
            pool_size=self._size.pool_pages * self._page_nbytes,
            deadline=_TIMEOUT,
            **disk,
        )

    def ask(self, node: int, pages: Sequence[int]) -> list[int]:
        """Ask as an engine does; all that was used is counted as of the first tier: only the nodes know better."""
        engine = self._engines[node]
        keys = [str(page) for page in pages]
        n_used = 0
        if keys:
            n_there = _leading(engine.node.exists(keys))
            if n_there:
                outcomes = engine.node.fetch(keys[:n_there], engine.pages[:n_there])
                n_used = _leading(outcomes)
                self._compare(engine.pages[:n_used], pages)
        rest = pages[n_used:]
        if rest:
            engine.pages[: len(rest)] = self._content(rest)
            engine.node.publish(keys[n_used:], engine.pages[: len(rest)])
        return [n_used, 0, 0, 0]

    def by_tier(self) -> tuple[int, ...]:
        """Return how many pages the nodes fetched from each tier; what peers had counts as of their memory."""
        counts = [0] * len(Tier)
        for engine in self._engines:
            for name, n in engine.node.counters().items():
                if name.startswith(_COUNTED):
                    source = name.removeprefix(_COUNTED).removesuffix('"}')
                    counts[_SOURCES.get(source, Tier.PEER_MEMORY)] += int(n)
        return tuple(counts)

    def working_sets(self) -> list[dict[str, float]]:
        """Return what each node estimates of what more memory would give, as of now."""
        found = []
        for engine in self._engines:
            caching = engine.node._parts.caching
            assert isinstance(caching, CacheParts)
            caching.announcer.tell_changed(idle=0.0)
            caching.working_set.turn()
            found.append(dict(caching.working_set.readings()))
        return found

    def working_set_of_all(self) -> dict[str, float]:
        """Return what they estimate together, after :meth:`working_sets`, as the first node shows it."""
        caching = self._engines[0].node._parts.caching
        assert isinstance(caching, CacheParts)
        caching.working_set.turn_of_all()
        return dict(caching.working_set.readings())

    def _content(self, pages: Sequence[int]) -> NDArray[np.uint64]:
        words = (np.array(pages, np.uint64) + np.uint64(1)) * _ODD
        content: NDArray[np.uint64] = words[:, None] + np.arange(self._page_nbytes // 8, dtype=np.uint64)
        return content

    def _compare(self, fetched: NDArray[np.uint64], pages: Sequence[int]) -> None:
        if not np.array_equal(fetched, self._content(pages[: len(fetched)])):
            raise WrongBytesError("a page that was fetched has other bytes than were published; report it")


def _leading(outcomes: NDArray[np.uint8]) -> int:
    missed = np.flatnonzero(outcomes == 0)
    return int(missed[0]) if len(missed) else len(outcomes)
