"""Models with more than one host pool (states, indexers, drafts): which prefixes are complete in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from p2pkv.integrations.sglang.pools import Indices
from p2pkv.node import Node
from p2pkv.page import Outcome

ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS = "all_pages", "trailing_pages", "block_groups"
"""SGLang's ``PoolHitPolicy``: which of a prefix's pages a pool must have."""


class PoolTransfer(Protocol):
    """The part of SGLang's ``PoolTransfer`` that is relied on."""

    name: str
    keys: Sequence[str] | None
    host_indices: Indices | None
    hit_policy: str


@dataclass(frozen=True, slots=True)
class PoolHits:
    """As SGLang's ``PoolTransferResult``: pages of the longest prefix, of each pool's own, and every good length."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int]

    @classmethod
    def none(cls) -> PoolHits:
        """Return that nothing is there."""
        return cls(0, {}, [])


class KeyedPool(Protocol):
    """A pool that knows the keys of its pages."""

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """Return the keys of pages."""


def served(
    node: Node,
    pools: Mapping[str, KeyedPool],
    hashes: Sequence[str],
    transfers: Sequence[PoolTransfer],
    *,
    kv_keys: Sequence[str] | None = None,
) -> PoolHits:
    """Ask the cluster, in one round, how long a prefix of ``hashes`` every pool can serve.

    The pages ``kv_keys`` are asked for besides those of ``transfers``. Without them the KV counts as there if one of
    the transfers is of a pool that holds something of every page.
    """
    stored = [transfer for transfer in transfers if str(transfer.name) in pools]
    asked = list(kv_keys or ())
    for transfer in stored:
        asked += pools[str(transfer.name)].keys(hashes)
    there = node.exists(asked, leading=not stored) == Outcome.HIT if asked else np.zeros(0, bool)
    n_kv = len(kv_keys or ())
    rows = iter(there[n_kv:].reshape(-1, len(hashes)))
    is_carried = any(transfer.hit_policy == ALL_PAGES for transfer in stored)
    # a page whose heads are split has several keys, and is there if all of them are
    kv = np.full(len(hashes), is_carried)
    if kv_keys is not None:
        kv[:] = there[:n_kv].reshape(len(hashes), -1).all(axis=1)
    return prefixes_served(kv, transfers, {str(transfer.name): next(rows) for transfer in stored})


def prefixes_served(
    kv: NDArray[np.bool_], transfers: Sequence[PoolTransfer], found: Mapping[str, NDArray[np.bool_]]
) -> PoolHits:
    """Say how long a prefix every pool can serve; ``found`` lacks the pools that are not stored, which serve none.

    ``kv[i]`` and ``found[pool][i]`` say whether page ``i`` is there.
    """
    n_pages = _run(kv)
    lengths = np.arange(1, n_pages + 1)
    restorable = np.ones(n_pages, bool)  # [i]: a prefix of i + 1 pages is good
    hits = {"kv": n_pages} if n_pages else {}
    for transfer in transfers:
        if transfer.hit_policy == BLOCK_GROUPS:
            continue  # it has no say in the KV's hits, and what is not named counts as not known
        pages = found.get(str(transfer.name), np.zeros(len(kv), bool))[:n_pages]
        if transfer.hit_policy == ALL_PAGES:
            good = lengths <= _run(pages)
        elif transfer.hit_policy == TRAILING_PAGES:
            tail = np.minimum(lengths, max(1, len(transfer.keys or ())))
            there = np.concatenate([[0], np.cumsum(pages)])
            good = there[lengths] - there[lengths - tail] == tail
        else:
            good = np.zeros(n_pages, bool)
        if good.any():
            hits[transfer.name] = int(lengths[good][-1])
        restorable &= good
    served = lengths[restorable].tolist()
    return PoolHits(served[-1] if served else 0, hits, served)


def _run(pages: NDArray[np.bool_]) -> int:
    missing = np.flatnonzero(~pages)
    return int(missing[0]) if len(missing) else len(pages)
