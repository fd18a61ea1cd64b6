"""A node whose calls find its pages as often as a test says, and what it brings of those that they find often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pages
from cluster import eventually
from p2pkv import Node
from p2pkv.cache.hot_guests import HotGuests, Limits
from p2pkv.cache.prefetch import Prefetch
from p2pkv.page import Keys
from p2pkv.parts.cache import CacheParts
from p2pkv.parts.hot_guests import make_hot_guests

PAGE = 4096
KEYS = [f"k{i}" for i in range(12)]
SETTLE_S = 30.0


class Reader:
    """A node whose calls find its pages as often as the test says."""

    def __init__(self, node: Node, n_pages: float, limits: Limits | None = None) -> None:
        self.node = node
        caching = node._parts.caching
        assert isinstance(caching, CacheParts)
        self.caching = caching
        self.rates: dict[bytes, float] = {}
        self.of_engines: dict[int, dict[bytes, float]] = {}
        self.now = 0.0
        made = make_hot_guests(caching, node._parts.control.epochs, node.metrics, 0, touch=True)
        self.hot = HotGuests(
            replace(made._around, hot_pages=self.hot_pages, engine_finds=self.engine_finds),
            int(n_pages * PAGE),
            limits=limits,
            clock=lambda: self.now,
        )
        caching.pins.on_asked_for = caching.prefetcher.on_asked_for = self.hot.asked_for

    def hot_pages(self, most: int, least_looks: int) -> list[tuple[bytes, float]]:
        return sorted(self.rates.items(), key=lambda page: -page[1])[:most]

    def engine_finds(self, least_rate: float, most: int) -> list[tuple[int, list[tuple[bytes, float, int]]]]:
        return [
            (engine, [(key, rate, 9) for key, rate in found.items()])
            for engine, found in self.of_engines.items()
        ]

    def engine_heats(self, engine: int, keys: list[str], rate: float) -> None:
        """Have this engine say that it finds these pages so often, and no others."""
        self.of_engines[engine] = dict.fromkeys(map(bytes, self.ids(keys)), rate)

    def ids(self, keys: list[str]) -> np.ndarray:
        return self.caching.cache.hash(keys)[1]

    def heat(self, keys: list[str], rate: float) -> None:
        self.rates |= dict.fromkeys(map(bytes, self.ids(keys)), rate)

    def turn(self, seconds: float = 1.0) -> int:
        """Look once, and again when all that was to come has come; return how many hot guests there are."""
        self.now += seconds
        self.hot.turn()
        eventually(
            lambda: self.caching.prefetcher._hot is None or self.caching.prefetcher._hot.done(), SETTLE_S
        )
        self.hot.turn()
        return int(self.hot.readings()["p2pkv_hot_guest_pages"])

    def here(self, keys: list[str] = KEYS) -> list[str]:
        found, _ = self.caching.pool.lookup(self.ids(keys))
        return [key for key, is_here in zip(keys, found.tolist(), strict=True) if is_here]


def published(node: Node, keys: list[str] = KEYS, nbytes: int = PAGE) -> None:
    memory = np.zeros((len(keys), nbytes), np.uint8)
    pages.fill(memory, keys)
    with node.register_memory(memory):
        assert node.publish(keys, memory).all()


def asked_of(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return what grows with each time that pages are to be brought, by the pages."""
    asked: list[list[str]] = []
    names = {bytes(key): name for name in [*KEYS, "long"] for key in reader.ids([name])}
    bring_hot = reader.caching.prefetcher.bring_hot

    def bring(ids: Keys, *others: Any) -> Prefetch | None:
        asked.append([names[bytes(key)] for key in ids])
        return bring_hot(ids, *others)

    monkeypatch.setattr(reader.caching.prefetcher, "bring_hot", bring)
    return asked


def found(node: Node, keys: list[str] = KEYS) -> list[str]:
    memory = np.zeros((len(keys), PAGE), np.uint8)
    with node.register_memory(memory):
        hits = node.fetch(keys, memory)
    assert pages.wrong(memory, keys, hits) == []
    return [key for key, hit in zip(keys, hits, strict=True) if hit]
