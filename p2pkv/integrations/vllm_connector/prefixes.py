"""Which blocks of a prompt other instances have published: asked in the background, so that scheduling never waits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2pkv.integrations.boundary import Boundary
from p2pkv.integrations.vllm_connector.groups import Group, Groups, Kind
from p2pkv.integrations.vllm_connector.weights import named
from p2pkv.node import Node
from p2pkv.page import Outcome


class Part:
    """What one rank holds of a block of one group: the layers and heads that are its own."""

    def __init__(self, rank: int, group: int, layout: str) -> None:
        """``layout`` says how the rank's caches of the group lie."""
        self._prefix = b"%d.%d/" % (rank, group) + hashlib.blake2b(layout.encode(), digest_size=8).digest()

    def key(self, block_hash: bytes) -> bytes:
        """Return the key of its part of a block."""
        return self._prefix + block_hash


@dataclass(slots=True)
class _Lookup:
    first: int  # token after which was asked
    n_found: Future[int]


class PrefixLookups:
    """The scheduler's look-ups, by request; used by its thread alone, which waits for none of them."""

    def __init__(
        self,
        node: Node,
        boundary: Boundary,
        groups: Groups,
        hash_size: int,
        parts: Sequence[Sequence[Part]],
    ) -> None:
        """Ask through ``node``. A block of a group counts if all its ``parts``, by group, are published.

        A request's hashes are each of ``hash_size`` tokens more.
        """
        self._node = node
        self._boundary = boundary
        self._groups, self._hash_size, self._parts = groups, hash_size, parts
        self._lookups: dict[str, _Lookup] = {}
        # one thread: look-ups of several requests would only share the same sockets
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="p2pkv-vllm-lookup")

    def n_found(
        self, request_id: str, hashes: Sequence[bytes], n_local: int, limit: int, weights: bytes = b""
    ) -> int | None:
        """Return how many tokens after ``n_local`` can be loaded, ``limit`` in all at most; None: not known, ask again.

        They are those computed with ``weights``, a name.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.first > n_local:
            if limit - n_local < self._groups.alignment:
                return 0
            asked = list(hashes[: limit // self._hash_size])
            lookup = _Lookup(n_local, self._asking.submit(self._ask, asked, n_local, limit, weights))
            self._lookups[request_id] = lookup
        if not lookup.n_found.done():
            return None
        # tokens that have been computed here meanwhile need not be loaded
        return max(0, lookup.n_found.result() - n_local)

    def _ask(self, hashes: list[bytes], n_local: int, limit: int, weights: bytes) -> int:
        named_hashes = named(weights, hashes)
        return self._boundary.call("exists", lambda: self._longest(named_hashes, n_local, limit), miss=0)

    def _longest(self, hashes: list[bytes], n_local: int, limit: int) -> int:
        """Return after how many tokens, ``limit`` at most, all is there that has to be loaded to go on from them.

        The first ``n_local`` are here. Full attention needs all blocks before that, a window its last ones alone.
        """
        found = [self._found(group, hashes, n_local, limit) for group in range(len(self._groups.each))]
        for group, is_there in zip(self._groups.each, found, strict=True):
            if group.kind is Kind.FULL and not is_there.all():
                limit = min(
                    limit, (n_local // group.block_size + int(np.argmin(is_there))) * group.block_size
                )
        alignment = self._groups.alignment
        for n_tokens in range(limit // alignment * alignment, n_local, -alignment):
            if all(
                self._has(g, there, n_local, n_tokens)
                for g, there in zip(self._groups.each, found, strict=True)
            ):
                return n_tokens
        return n_local

    def _found(self, number: int, hashes: list[bytes], n_local: int, limit: int) -> NDArray[np.bool_]:
        """Return which blocks of a group are there, from the one of token ``n_local`` on."""
        group, parts = self._groups.each[number], self._parts[number]
        numbers = range(n_local // group.block_size, limit // group.block_size)
        keys = [part.key(h) for h in group.hashes(hashes, self._hash_size, numbers) for part in parts]
        if not keys:
            return np.ones(len(numbers), np.bool_)
        outcomes = self._node.exists(keys).reshape(len(numbers), len(parts))
        is_there: NDArray[np.bool_] = (outcomes == Outcome.HIT).all(axis=1)
        return is_there

    @staticmethod
    def _has(group: Group, is_there: NDArray[np.bool_], n_local: int, n_tokens: int) -> bool:
        missing, first = group.missing(n_local, n_tokens), n_local // group.block_size
        return bool(is_there[missing.start - first : missing.stop - first].all())

    def forget(self, request_id: str) -> None:
        """Drop what is known for a request."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            lookup.n_found.cancel()

    def close(self) -> None:
        """Close the node, which ends look-ups under way, and the thread. Idempotent."""
        self._node.close()
        self._asking.shutdown(cancel_futures=True)
