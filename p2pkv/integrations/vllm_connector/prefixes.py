"""Which blocks of a prompt other instances have published: asked in the background, so that scheduling never waits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from p2pkv.integrations.boundary import Boundary
from p2pkv.integrations.vllm_connector.weights import named
from p2pkv.node import Node
from p2pkv.page import Outcome


class Part:
    """What one rank holds of a block: the layers and heads that are its own."""

    def __init__(self, rank: int, layout: str) -> None:
        """``layout`` says how the rank's caches lie."""
        self._prefix = b"%d/" % rank + hashlib.blake2b(layout.encode(), digest_size=8).digest()

    def key(self, block_hash: bytes) -> bytes:
        """Return the key of its part of a block."""
        return self._prefix + block_hash


@dataclass(slots=True)
class _Lookup:
    first: int  # number of the first block that was asked for
    n_found: Future[int]


class PrefixLookups:
    """The scheduler's look-ups, by request; used by its thread alone, which waits for none of them."""

    def __init__(self, node: Node, boundary: Boundary, parts: Sequence[Part]) -> None:
        """Ask through ``node``. A block counts if all its ``parts`` are published."""
        self._node = node
        self._boundary = boundary
        self._parts = parts
        self._lookups: dict[str, _Lookup] = {}
        # one thread: look-ups of several requests would only share the same sockets
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="p2pkv-vllm-lookup")

    def n_found(
        self, request_id: str, hashes: Sequence[bytes], first: int, weights: bytes = b""
    ) -> int | None:
        """Return how many blocks from number ``first`` on are there without a gap; None: not known yet, ask again.

        They are those computed with ``weights``, a name.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.first > first:
            if first >= len(hashes):
                return 0
            asked = list(hashes[first:])
            lookup = _Lookup(first, self._asking.submit(self._ask, asked, weights))
            self._lookups[request_id] = lookup
        if not lookup.n_found.done():
            return None
        # blocks that have been computed here meanwhile need not be loaded
        return max(0, lookup.first + lookup.n_found.result() - first)

    def _ask(self, hashes: list[bytes], weights: bytes) -> int:
        return self._boundary.call("exists", lambda: self._leading(named(weights, hashes)), miss=0)

    def _leading(self, hashes: list[bytes]) -> int:
        keys = [part.key(h) for h in hashes for part in self._parts]
        found = (self._node.exists(keys) == Outcome.HIT).reshape(len(hashes), len(self._parts)).all(axis=1)
        missing = np.flatnonzero(~found)
        return int(missing[0]) if len(missing) else len(hashes)

    def forget(self, request_id: str) -> None:
        """Drop what is known for a request."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            lookup.n_found.cancel()

    def close(self) -> None:
        """Close the node, which ends look-ups under way, and the thread. Idempotent."""
        self._node.close()
        self._asking.shutdown(cancel_futures=True)
