"""Which of the blocks that a rank has published its node still has, in memory and on disk: what vLLM's KV events tell.

A node knows pages by keys that can't be turned back into vLLM's hashes, so whoever publishes says what is what first.
Of blocks that were published before this process began nobody knows that, and nothing is told of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from p2pkv.page import page_key

_SPARE_NAMES = 1 << 16
"""So many names may be known of blocks that are nowhere, beside one for each that is somewhere."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """A block as vLLM knows it."""

    group: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Change:
    """A rank's part of a block is in a medium of its node now, or is not any more."""

    rank: int
    medium: str
    is_stored: bool
    block: BlockName


class Residents:
    """Told by a node's events and a publishing thread, asked by vLLM's. Thread-safe."""

    def __init__(self, rank: int, namespace: str) -> None:
        self._rank, self._namespace = rank, namespace
        self._lock = threading.Lock()  # guards what follows
        self._names: dict[bytes, BlockName] = {}  # by key
        self._there: set[tuple[str, bytes]] = set()  # by medium and key
        self._told: set[tuple[str, BlockName]] = set()
        self._changed: dict[
            tuple[str, bytes], BlockName
        ] = {}  # since the last time, in order; names outlive _names

    def name(self, keys: Sequence[bytes], epoch: int, blocks: Sequence[BlockName]) -> None:
        """Say which blocks are about to be published under which names, before they are."""
        named = {
            page_key(self._namespace, key, epoch): block for key, block in zip(keys, blocks, strict=True)
        }
        with self._lock:
            if len(self._names) > len(self._there) + _SPARE_NAMES:
                kept = {key for _, key in self._there}
                self._names = {key: block for key, block in self._names.items() if key in kept}
            self._names |= named

    def hear(self, kind: str, medium: str, keys: Sequence[bytes]) -> None:
        """Take an event of the node (:meth:`p2pkv.Node.follow_kv_events`)."""
        with self._lock:
            if kind == "AllBlocksCleared":
                for place in self._there:
                    self._note(place)
                self._there.clear()
            for key in keys:
                place = (medium, key)
                if kind == "BlockStored":
                    self._there.add(place)
                else:
                    self._there.discard(place)
                self._note(place)

    def _note(self, place: tuple[str, bytes]) -> None:
        name = self._names.get(place[1])
        if name is not None:
            self._changed[place] = name

    def take(self) -> list[Change]:
        """Return what has changed since the last time; what went and came back meanwhile has not."""
        with self._lock:
            changed, self._changed = self._changed, {}
            found = []
            for place, block in changed.items():
                told, is_there = (place[0], block), place in self._there
                if is_there != (told in self._told):
                    (self._told.add if is_there else self._told.discard)(told)
                    found.append(Change(self._rank, place[0], is_there, block))
            return found
