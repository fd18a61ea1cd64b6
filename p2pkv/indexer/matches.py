"""How much of a prompt lies where: the leading runs of blocks, by what the directory says of their pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2pkv.indexer.requests import MAX_HASHES
from p2pkv.page import LOCATION, RESIDENT, Keys, as_locations

Look = Callable[[Keys, float], tuple[NDArray[np.uint8], NDArray[np.uint8]]]
"""Looks keys up until a deadline, as :meth:`~p2pkv.directory.client.DirectoryClient.get` does."""


@dataclass(frozen=True, slots=True)
class Match:
    """Blocks from the first one on, each count at least the one before it."""

    cpu: int = 0
    """In the pools of the nodes in question."""
    disk: int = 0
    """In their pools or on their disks."""
    external: int = 0
    """With any node at all."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of blocks lie: ``(n_blocks, n_parts)`` each."""

    is_found: NDArray[np.bool_]
    is_resident: NDArray[np.bool_]
    owners: NDArray[np.uint64]

    def first_owners(self) -> list[int]:
        """Return the node keys of those who have a part of the first block: nobody else has a run."""
        if not len(self.owners):
            return []
        found: list[int] = np.unique(self.owners[0][self.is_found[0]]).tolist()
        return found

    def match(self, node_keys: Sequence[int]) -> Match:
        """Return what these nodes have together."""
        external = _leading(self.is_found)
        if not external or not set(self.first_owners()) <= set(node_keys):
            return Match(external=external)
        is_theirs = np.zeros_like(self.is_found)
        for key in node_keys:  # a few: `isin` sorts all owners
            is_theirs |= self.owners == np.uint64(key)
        is_local = self.is_found & is_theirs
        return Match(
            cpu=_leading(is_local & self.is_resident),
            disk=_leading(is_local),
            external=external,
        )


def locate(look: Look, keys: Keys, n_parts: int, timeout: float) -> Places:
    """Ask the directory for the parts of blocks, ``timeout`` seconds at most; what is not known by then is nowhere."""
    deadline = time.monotonic() + timeout
    found = [np.zeros(0, np.uint8)]
    raw = [np.zeros((0, LOCATION.itemsize), np.uint8)]
    for first in range(0, len(keys), MAX_HASHES):
        there, where = look(keys[first : first + MAX_HASHES], deadline)
        found.append(there)
        raw.append(where)
    locations = as_locations(np.concatenate(raw))
    shape = (-1, n_parts)
    return Places(
        is_found=np.concatenate(found).astype(bool).reshape(shape),
        is_resident=(locations["flags"] & RESIDENT != 0).reshape(shape),
        owners=locations["owner"].reshape(shape),
    )


def _leading(has_part: NDArray[np.bool_]) -> int:
    """Return how many blocks from the first one on have all their parts."""
    gaps = np.flatnonzero(~has_part.all(axis=1))
    return int(gaps[0]) if len(gaps) else len(has_part)
