"""Which blocks of a prompt other instances have published: asked in the background, so that scheduling never waits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2pkv.integrations.boundary import Boundary, guarded
from p2pkv.integrations.vllm_connector.groups import Group, Groups, Kind
from p2pkv.integrations.vllm_connector.request import Request
from p2pkv.integrations.vllm_connector.weights import named
from p2pkv.node import Node
from p2pkv.page import Outcome, Whereabouts
from p2pkv.recompute.hits import Hits
from p2pkv.recompute.rates import Source
from p2pkv.tracing import about


class Part:
    """What one rank holds of a block of one group: the layers and heads that are its own."""

    def __init__(self, rank: int, group: int, layout: str) -> None:
        """``layout`` says how the rank's caches of the group lie."""
        self._prefix = b"%d.%d/" % (rank, group) + hashlib.blake2b(layout.encode(), digest_size=8).digest()

    def key(self, block_hash: bytes) -> bytes:
        """Return the key of its part of a block."""
        return self._prefix + block_hash


@dataclass(frozen=True, slots=True)
class Found:
    """What others have of a prompt."""

    n_tokens: int
    """After how many tokens all is there that has to be loaded to go on from them."""
    hits: Hits | None = None
    """The blocks from the first one that is missing here up to that, if a part of them is worth having: of a model with
    one group of full attention."""


@dataclass(slots=True)
class _Lookup:
    first: int  # token after which was asked
    found: Future[Found]


@dataclass(frozen=True, slots=True, eq=False)
class _There:
    """Where the blocks of one group are."""

    is_there: NDArray[np.bool_]
    """Which blocks some live node has."""
    parts: Whereabouts | None
    """Of their parts, rank after rank; None: there are none."""
    block_size: int
    n_parts: int

    def hits(self, n_local: int, n_tokens: int, of_tokens: int) -> Hits | None:
        """Return the blocks up to ``n_tokens`` as what is decided about; None if there are none.

        All ranks load their parts at once, and what has a part on a disk comes as fast as that: a block is taken for
        the part of the first rank, on disk if any of its parts is.
        """
        n = (n_tokens - n_local) // self.block_size
        if self.parts is None or n <= 0:
            return None
        shape = (len(self.is_there), self.n_parts)
        owners = self.parts.owners.reshape(shape)[:n, 0]
        is_on_disk = self.parts.is_on_disk.reshape(shape)[:n].any(axis=1)
        nbytes = self.parts.nbytes.reshape(shape)[:n, 0].astype(np.int64)
        keys = np.stack([owners, is_on_disk.astype(np.uint64)], axis=1)
        known, of_page = np.unique(keys, axis=0, return_inverse=True)
        sources = [Source(int(owner), bool(on_disk)) for owner, on_disk in known]
        return Hits(sources, of_page.reshape(-1), nbytes, self.block_size, n_local, of_tokens)


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
        self.boundary = boundary
        self._groups, self._hash_size, self._parts = groups, hash_size, parts
        self._lookups: dict[str, _Lookup] = {}
        # one thread: look-ups of several requests would only share the same sockets
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="p2pkv-vllm-lookup")

    def found(self, request: Request, n_local: int, limit: int, *, weights: bytes = b"") -> Found | None:
        """Return what others have of a request, ``limit`` tokens at most; None: not known, ask again.

        The first ``n_local`` are here. The others were computed with ``weights``, a name.
        """
        request_id = request.request_id
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.first > n_local:
            if limit - n_local < self._groups.alignment:
                return Found(n_local)
            hashes, n_tokens = list(request.block_hashes[: limit // self._hash_size]), request.num_tokens

            def ask() -> Found:
                with about(request_id):
                    found = self._ask(named(weights, hashes), n_local, limit, n_tokens)
                return Found(n_local) if found is None else found

            lookup = self._lookups[request_id] = _Lookup(n_local, self._asking.submit(ask))
        return lookup.found.result() if lookup.found.done() else None

    @guarded("exists", miss=None)
    def _ask(self, hashes: list[bytes], n_local: int, limit: int, of_tokens: int) -> Found:
        there = [self._whereabouts(group, hashes, n_local, limit) for group in range(len(self._groups.each))]
        n_tokens = self._longest([each.is_there for each in there], n_local, limit)
        is_plain = self._groups.is_plain and n_local % self._groups.alignment == 0
        return Found(n_tokens, there[0].hits(n_local, n_tokens, of_tokens) if is_plain else None)

    def _longest(self, found: Sequence[NDArray[np.bool_]], n_local: int, limit: int) -> int:
        """Return after how many tokens, ``limit`` at most, all is there that has to be loaded to go on from them.

        The first ``n_local`` are here, and of the blocks of each group after those ``found`` says which others have.
        Full attention needs all blocks before that, a window its last ones alone.
        """
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

    def _whereabouts(self, number: int, hashes: list[bytes], n_local: int, limit: int) -> _There:
        """Return where the blocks of a group are, from the one of token ``n_local`` on."""
        group, parts = self._groups.each[number], self._parts[number]
        numbers = range(n_local // group.block_size, limit // group.block_size)
        keys = [part.key(h) for h in group.hashes(hashes, self._hash_size, numbers) for part in parts]
        if not keys:
            return _There(np.ones(len(numbers), np.bool_), None, group.block_size, len(parts))
        # Of full attention all blocks are needed, so that what comes after a gap counts for nothing.
        there = self._node.whereabouts(keys, leading=group.kind is Kind.FULL)
        outcomes = there.outcomes.reshape(len(numbers), len(parts))
        return _There((outcomes == Outcome.HIT).all(axis=1), there, group.block_size, len(parts))

    @staticmethod
    def _has(group: Group, is_there: NDArray[np.bool_], n_local: int, n_tokens: int) -> bool:
        missing, first = group.missing(n_local, n_tokens), n_local // group.block_size
        return bool(is_there[missing.start - first : missing.stop - first].all())

    def forget(self, request_id: str) -> None:
        """Drop what is known for a request."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            lookup.found.cancel()

    def close(self) -> None:
        """Close the node, which ends look-ups under way, and the thread. Idempotent."""
        self._node.close()
        self._asking.shutdown(cancel_futures=True)
