"""SGLang's host pools as p2pkv sees them: where pages lie, how long they are, and how their keys begin.

What a pool offers is looked at once, when it is registered. A page is stored as one entry, whatever the number of its
pieces (K and V; or K and V of each layer). In a pool of one buffer the pieces are taken in the order of their
addresses: that is the order of SGLang's flat pages too, so both of its interfaces find the same entries. Where servers
of unequal tensor parallelism are to share pages (``tp_lcm_size``), those of K and V are stored by shares of their
heads, as many entries a page as ranks of the largest server have its heads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import UsageError
from p2pkv.integrations.ranges import Range
from p2pkv.integrations.sglang.keys import KeyPrefix
from p2pkv.integrations.sglang.settings import Rank
from p2pkv.integrations.sglang.weights import Weights
from p2pkv.page import Outcome, Outcomes, Pieces

KV = "kv"
"""The name of the pool of K and V."""
SHARDED_SIDE_POOLS = frozenset({"mamba"})
"""Pools whose pages differ from rank to rank even where the model's KV is the same on all."""


class Indices(Protocol):
    """Token numbers in a host pool, such as a tensor; ``page_size`` of them a page."""

    def __len__(self) -> int: ...
    def tolist(self) -> list[int]: ...


class SGLangPool(Protocol):
    """The part of SGLang's ``HostKVCache`` that is relied on; ``layout``, ``dtype`` are taken too where offered.

    Its memory is ``kv_buffer`` or, of pools that hold something else than K and V, what ``get_hybrid_pool_buffer()``
    returns: a tensor, or several.
    """

    page_size: int

    def get_page_buffer_meta(self, indices: Indices) -> tuple[Sequence[int], Sequence[int]]:
        """Return the address and the length of every piece of every page."""

    def get_split_heads_page_buffer_meta(
        self, indices: Indices, split_factor: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return so for every share of its heads of every page; relied on where heads are split only."""


class HostPool:
    """One host pool; immutable. ``page_size`` is the tokens of a page, ``page_nbytes`` its length.

    A page is ``n_shares`` entries, whose keys and pieces follow one another.
    """

    def __init__(self, pool: SGLangPool, name: str, rank: Rank, weights: Weights) -> None:
        """Look at ``pool``. Raises :class:`~p2pkv.errors.UsageError` if it can't say where its pages lie."""
        self._pool = pool
        # with decode context parallelism a page is spread over ranks: so many tokens, of which this rank has its part
        self.page_size = int(getattr(pool, "logical_page_size", None) or pool.page_size)
        self._buffers = buffers_of(pool)
        if not self._buffers:
            raise UsageError(f"host pool {name!r} has no memory")
        self.ranges = [Range.of(buffer) for buffer in self._buffers]
        self.n_shares = rank.n_shares if name == KV else 1
        try:
            addresses, lengths = self._lie(_tokens(self.page_size))
        except (
            NotImplementedError,
            ValueError,
            AssertionError,
        ) as error:  # SGLang asserts that the heads divide
            in_shares = f" in {self.n_shares} shares of its heads" if self.n_shares > 1 else ""
            raise UsageError(
                f"host pool {name!r} can't say where its pages lie{in_shares}: {error or type(error).__name__}"
            ) from error
        self.page_nbytes = sum(lengths)
        n_pieces = len(lengths) // self.n_shares
        self._entry_nbytes = sum(lengths[:n_pieces])
        self._order = self._address_order(addresses, lengths, n_pieces)
        self.prefix = self._prefix(name, lengths[:n_pieces], rank, weights)

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """Return the keys of pages of this pool, of the weights as they are now."""
        return self.prefix.keys(hashes)

    def pieces(self, n_pages: int, indices: Indices | None) -> Pieces:
        """Return where ``n_pages`` pages lie, whose tokens are ``indices``; nothing of those is kept."""
        n_indices = 0 if indices is None else len(indices)
        if indices is None or n_indices != n_pages * self.page_size:
            raise UsageError(f"{n_pages} pages of {self.page_size} tokens, but {n_indices} token indices")
        addresses, lengths = self._lie(indices)
        n_entries = n_pages * self.n_shares
        if len(addresses) != len(lengths) or len(addresses) % n_entries:
            raise UsageError(f"{len(addresses)} addresses and {len(lengths)} lengths for {n_entries} entries")
        pieces = np.empty((n_entries, len(addresses) // n_entries, 2), np.int64)
        pieces[:, :, 0] = np.asarray(addresses, np.int64).reshape(n_entries, -1)
        pieces[:, :, 1] = np.asarray(lengths, np.int64).reshape(n_entries, -1)
        wrong = np.flatnonzero(pieces[:, :, 1].sum(axis=1) != self._entry_nbytes)
        if len(wrong):
            raise UsageError(
                f"page {wrong[0] // self.n_shares} is not {self.page_nbytes} bytes long, as this pool's pages are"
            )
        return Pieces(pieces if self._order is None else pieces[:, self._order])

    def of_pages(self, outcomes: Outcomes) -> Outcomes:
        """Return what became of each page, given what did of its shares: a page is a hit if all of them are."""
        shares = outcomes.reshape(-1, self.n_shares)
        first_miss = np.argmax(shares != Outcome.HIT, axis=1)
        outcome: Outcomes = shares[np.arange(len(shares)), first_miss]
        return outcome

    def _lie(self, indices: Indices) -> tuple[Sequence[int], Sequence[int]]:
        if self.n_shares == 1:
            return self._pool.get_page_buffer_meta(indices)
        return self._pool.get_split_heads_page_buffer_meta(indices, self.n_shares)

    def _address_order(
        self, addresses: Sequence[int], lengths: Sequence[int], n_pieces: int
    ) -> NDArray[np.int64] | None:
        for address, nbytes in zip(addresses, lengths, strict=True):
            if not any(
                r.address <= address and address + nbytes <= r.address + r.nbytes for r in self.ranges
            ):
                raise UsageError(
                    f"a piece of {nbytes} bytes at {address:#x} lies outside of the pool's buffers"
                )
        # of several buffers the addresses have no order that another process would have too
        if len(self.ranges) > 1:
            return None
        order = np.argsort(np.asarray(addresses[:n_pieces], np.int64), kind="stable")
        return None if (order == np.arange(len(order))).all() else order

    def _prefix(self, name: str, lengths: Sequence[int], rank: Rank, weights: Weights) -> KeyPrefix:
        buffer = self._buffers[0]
        dtype = getattr(self._pool, "dtype", None) or getattr(buffer, "dtype", "unknown")
        layout = getattr(self._pool, "layout", None) or f"of {len(getattr(buffer, 'shape', ()))} dimensions"
        kind = f"{name} {layout} {dtype} page={self.page_size} pieces={list(lengths)}"
        is_shared = rank.is_replicated and name not in SHARDED_SIDE_POOLS
        return KeyPrefix(kind, rank, weights, is_shared=is_shared, n_shares=self.n_shares)


def buffers_of(pool: object) -> list[object]:
    """Return a pool's tensors; of a pool that only counts tokens there are none."""
    buffers = getattr(pool, "kv_buffer", None)
    offered = getattr(pool, "get_hybrid_pool_buffer", None)
    return list(_leaves(offered() if buffers is None and offered is not None else buffers))


def _tokens(n_tokens: int) -> Indices:
    """Return the first token numbers, as SGLang has them: some of its pools take tensors only."""
    torch = sys.modules.get("torch")  # where SGLang runs it was imported long ago
    return np.arange(n_tokens) if torch is None else torch.arange(n_tokens)


def _leaves(buffers: object) -> Iterator[object]:
    if isinstance(buffers, (list, tuple)):
        for buffer in buffers:
            yield from _leaves(buffer)
    elif buffers is not None:
        yield buffers
