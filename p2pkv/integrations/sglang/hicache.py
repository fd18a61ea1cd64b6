"""SGLang's HiCache keeps its third tier (L3) in a p2pkv cluster.

Load it with ``--hicache-storage-backend dynamic``; ``docs/sglang.md`` has the command line. Each scheduler process has
a node of its own. SGLang asks for prefixes, reads and writes batches of pages from three threads; no exception reaches
them: what goes wrong is a miss, counted, and logged, each cause once a minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from p2pkv.config import Config
from p2pkv.errors import UsageError
from p2pkv.integrations.boundary import Boundary, guarded
from p2pkv.integrations.ranges import Range
from p2pkv.integrations.sglang.heartbeat import announce_server
from p2pkv.integrations.sglang.installed import StorageBase, batch_pages
from p2pkv.integrations.sglang.keys import KeyPrefix
from p2pkv.integrations.sglang.pools import KV, HostPool, Indices, SGLangPool, buffers_of
from p2pkv.integrations.sglang.settings import Rank, node_config
from p2pkv.integrations.sglang.side_pools import PoolHits, PoolTransfer, served
from p2pkv.integrations.sglang.staging import Staging
from p2pkv.integrations.sglang.stats import Stats, TrafficLog, take_stats
from p2pkv.integrations.sglang.weights import Weights
from p2pkv.integrations.sglang.weights import served as served_weights
from p2pkv.node import Node
from p2pkv.page import Outcome, Outcomes

_log = logging.getLogger(__name__)

_NOT_CLEARED = (
    "an attached server's pages are its host's node's, and other servers use them; `p2pkv namespace bump` takes "
    "back those of a namespace, for all"
)


class P2PKVHiCache(StorageBase):
    """A storage backend of SGLang over a node, which is its ``node``. Thread-safe once its pools are registered.

    A page that can't be had is a miss whatever the reason. A page that was set can be fetched by any rank of the
    cluster that would have computed the same bytes, and by no other.
    """

    def __init__(
        self,
        storage_config: object,
        kwargs: Mapping[str, object] | None = None,
        *,
        start_node: Callable[[Config], Node] = Node.start,
        weights: Weights | None = None,
    ) -> None:
        """Start the node and join its cluster. Errors of the configuration are raised here: SGLang does not start."""
        self.storage_config = storage_config
        self._weights = served_weights() if weights is None else weights
        self._rank = Rank.read(storage_config)
        self._config = node_config(storage_config, self._rank)
        if self._config.attach:
            _log.info("SGLang HiCache: /hicache/storage-backend/clear will clear nothing: %s", _NOT_CLEARED)
        self.node = start_node(self._config)
        self.boundary = Boundary("SGLang HiCache", self.node.metrics)
        self._pools: dict[str, HostPool] = {}
        self._is_logical = False  # the KV pool is one without memory: only side pools hold pages
        self._registered: list[Range] = []
        self._bare_prefix = KeyPrefix(
            "without a pool", self._rank, self._weights, is_shared=self._rank.is_replicated
        )
        self._unstored: list[str] = []  # pools without which no prefix is complete
        self._weights.on_change(self._announce)
        self._read_through, self._written_through = Staging(self.node), Staging(self.node)
        is_measured = bool(getattr(storage_config, "enable_storage_metrics", False))
        self._reads, self._writes = TrafficLog(is_measured=is_measured), TrafficLog(is_measured=is_measured)

    # --- registration: on SGLang's main thread, before any page moves; errors end the attach

    def register_mem_pool_host(self, mem_pool_host: SGLangPool) -> None:
        """Take the pool that holds the KV pages. Raises :class:`UsageError` if its layout can't be stored."""
        self.mem_pool_host = mem_pool_host
        self._is_logical = not buffers_of(mem_pool_host)
        if not self._is_logical:
            pool = HostPool(mem_pool_host, KV, self._rank, self._weights)
            self._adopt(pool, KV)
            self._warn_of_a_small_pool(pool)
        self._announce()

    def _warn_of_a_small_pool(self, pool: HostPool) -> None:
        needed = batch_pages() * pool.page_nbytes
        if self._rank.writes and not self._config.attach and self._config.pool_nbytes < needed:
            _log.warning(
                "SGLang HiCache: pool_size %s has no room for one of SGLang's batches, %d pages of %d bytes: of a "
                "longer prompt nothing is stored after its first batch; set pool_size to %dMiB or more",
                self._config.pool_size,
                batch_pages(),
                pool.page_nbytes,
                -(-needed // 2**20),
            )

    def _announce(self) -> None:
        """Tell routers of this server, and what its pages' keys are made of."""
        pool = self._pools.get(KV)
        announce_server(
            self._config,
            self._rank.index,
            self.node,
            node_id=self.node.owner_id,
            namespace=self._config.namespace,
            page_size=pool.page_size if pool is not None else 0,
            key_prefix=str(pool.prefix) if pool is not None else "",
        )

    def register_mem_host_pool_v2(self, host_pool: SGLangPool, host_pool_name: str) -> None:
        """Take a pool by name; without a side pool that can't be stored nothing is stored, which is said in the end."""
        name = str(host_pool_name)
        if name == KV:
            if getattr(self, "mem_pool_host", None) is not host_pool:
                self.register_mem_pool_host(host_pool)
            return
        try:
            self._adopt(HostPool(host_pool, name, self._rank, self._weights), name)
        except Exception as error:  # noqa: BLE001 - SGLang's own classes may raise anything
            self.boundary.note("register", error)
            self._unstored.append(f"{name} ({type(host_pool).__name__}: {error})")

    def on_host_pools_registered(self) -> None:
        """Say so if a pool can't be stored: then no prefix would ever be complete, and nothing is published."""
        if self._unstored:
            _log.error(
                "SGLang HiCache: L3 is off, nothing is stored and nothing found: this model needs pages of pools that "
                "p2pkv can't store: %s",
                "; ".join(self._unstored),
            )

    def _adopt(self, pool: HostPool, name: str) -> None:
        for memory in pool.ranges:
            end = memory.address + memory.nbytes
            if not any(r.address <= memory.address and end <= r.address + r.nbytes for r in self._registered):
                self.node.register_address(memory.address, memory.nbytes, memory.owner)
                self._registered.append(memory)
        self._pools[name] = pool

    # --- what is there: SGLang's prefetch thread

    def exists(self, key: str) -> bool:
        """Say whether some node has the page."""
        return self.batch_exists([key]) == 1

    @guarded("exists", miss=0)
    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """Return how many pages from the first on are there without a gap; one look-up round for all."""
        if not keys or self._is_logical or self._unstored:
            return 0  # pages that are nowhere but in side pools, of which this call knows nothing
        return _leading(self._of_pages(self.node.exists(self._keys(keys), leading=True)))

    @guarded("exists", miss=PoolHits.none())
    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: object = None,
    ) -> PoolHits:
        """Return which prefixes can be served by the KV pool and every side pool; one look-up round for all."""
        if not keys or self._unstored:
            return PoolHits.none()
        kv_keys = None if self._is_logical else self._keys(keys)
        return served(self.node, self._pools, keys, pool_transfers or (), kv_keys=kv_keys)

    # --- zero copy: SGLang's prefetch and backup threads (interface_v1)

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Indices, extra_info: object = None
    ) -> list[bool]:
        """Fetch pages into the KV pool, ``page_size`` of ``host_indices`` each; True for those that came."""
        return self._get(KV, keys, host_indices)

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Indices, extra_info: object = None
    ) -> list[bool]:
        """Publish pages of the KV pool; True for those that any node can fetch now."""
        return self._set(KV, keys, host_indices)

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: object = None
    ) -> dict[str, list[bool]]:
        """Fetch pages into the pools that are named."""
        return {t.name: self._get(str(t.name), t.keys or (), t.host_indices) for t in transfers}

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: object = None
    ) -> dict[str, list[bool]]:
        """Publish pages of the pools that are named."""
        return {t.name: self._set(str(t.name), t.keys or (), t.host_indices) for t in transfers}

    def _get(self, name: str, hashes: Sequence[str], indices: Indices | None) -> list[bool]:
        if not hashes or (name == KV and self._is_logical):
            return [True] * len(hashes)
        return self._fetch(name, hashes, indices) or [False] * len(hashes)

    @guarded("get", miss=None)
    def _fetch(self, name: str, hashes: Sequence[str], indices: Indices | None) -> list[bool]:
        began = time.monotonic()
        pool = self._pool(name)
        outcomes = pool.of_pages(self.node.fetch(pool.keys(hashes), pool.pieces(len(hashes), indices)))
        self._reads.add(outcomes, pool.page_nbytes, time.monotonic() - began)
        return _as_bools(outcomes)

    def _set(self, name: str, hashes: Sequence[str], indices: Indices | None) -> list[bool]:
        if not hashes or (name == KV and self._is_logical):
            return [True] * len(hashes)
        return (not self._unstored and self._publish(name, hashes, indices)) or [False] * len(hashes)

    @guarded("set", miss=None)
    def _publish(self, name: str, hashes: Sequence[str], indices: Indices | None) -> list[bool]:
        began = time.monotonic()
        pool = self._pool(name)
        outcomes = pool.of_pages(self.node.publish(pool.keys(hashes), pool.pieces(len(hashes), indices)))
        self._writes.add(outcomes, pool.page_nbytes, time.monotonic() - began)
        return _as_bools(outcomes)

    # --- flat pages: the same threads without interface_v1; a tensor a page

    def get(self, key: str, target_location: object = None, target_sizes: object = None) -> object | None:
        """Fetch a page into the flat tensor ``target_location``; return that, or None."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[object] | None = None,
        target_sizes: object = None,
    ) -> list[object | None]:
        """Fetch pages into flat tensors; return those, None for a miss."""
        found: list[object | None] = [None] * len(keys)
        self._fetch_flat(keys, target_locations, found)
        return found

    @guarded("get", miss=None)
    def _fetch_flat(
        self, keys: Sequence[str], locations: Sequence[object] | None, found: list[object | None]
    ) -> None:
        began = time.monotonic()
        rows, targets = self._flat_pages("get", keys, locations)
        if rows:
            outcomes = self._read_through.fetch(self._keys([keys[row] for row in rows]), targets)
            self._reads.add(outcomes, targets[0].nbytes, time.monotonic() - began)
            for i in np.flatnonzero(outcomes == Outcome.HIT).tolist():
                found[rows[i]] = (locations or ())[rows[i]]

    def set(
        self, key: str, value: object = None, target_location: object = None, target_sizes: object = None
    ) -> bool:
        """Publish a page from the flat tensor ``value``; True if any node can fetch it now."""
        return self.batch_set([key], [value if target_location is None else target_location])

    @guarded("set", miss=False)
    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[object] | None = None,
        target_locations: Sequence[object] | None = None,
        target_sizes: object = None,
    ) -> bool:
        """Publish pages from flat tensors; True if any node can fetch all of them now."""
        began = time.monotonic()
        if self._unstored:
            return False
        rows, pages = self._flat_pages("set", keys, values if target_locations is None else target_locations)
        if not rows:
            return not keys
        outcomes = self._written_through.publish(self._keys([keys[row] for row in rows]), pages)
        self._writes.add(outcomes, pages[0].nbytes, time.monotonic() - began)
        return int((outcomes == Outcome.HIT).sum()) == len(keys)

    def _flat_pages(
        self, operation: str, keys: Sequence[str], buffers: Sequence[object] | None
    ) -> tuple[list[int], list[Range]]:
        """Return which of ``buffers`` can hold a page, and where they lie; each of the others is a failure."""
        if buffers is None or len(buffers) != len(keys):
            raise UsageError(f"{len(keys)} keys, but {'no' if buffers is None else len(buffers)} tensors")
        pool = self._pools.get(KV)
        if pool is not None and pool.n_shares > 1:
            raise UsageError("flat pages are not split by heads; set interface_v1 where tp_lcm_size is set")
        rows: list[int] = []
        pages: list[Range] = []
        for row, buffer in enumerate(buffers):
            try:
                page = Range.of(buffer)
                if pool is not None and page.nbytes != pool.page_nbytes:
                    raise UsageError(
                        f"a flat page of {page.nbytes} bytes; this pool's have {pool.page_nbytes}"
                    )
            except UsageError as error:
                self.boundary.note(operation, error)
            else:
                rows.append(row)
                pages.append(page)
        return rows, pages

    # --- the rest: SGLang's main thread

    @guarded("clear", miss=False)
    def clear(self) -> bool:
        """Take back every page that this rank published. Other ranks and servers keep theirs.

        Attached, nothing is: the pages are the host's node's, and may be other servers' as well.
        """
        if self._config.attach:
            _log.warning("SGLang HiCache: nothing is cleared: %s", _NOT_CLEARED)
            return False
        return self.node.clear() >= 0

    def get_stats(self) -> Stats:
        """Return pages and bandwidth of the calls since the last time, as SGLang's metrics want them."""
        return take_stats(self._reads, self._writes)

    def close(self) -> None:
        """Leave the cluster; what is called afterwards misses. Idempotent; takes a deadline and a little more."""
        self._weights.forget(self._announce)
        self.node.close()

    def _pool(self, name: str) -> HostPool:
        try:
            return self._pools[name]
        except KeyError:
            raise UsageError(f"host pool {name!r} was not registered, or could not be stored") from None

    def _keys(self, hashes: Sequence[str]) -> list[str]:
        pool = self._pools.get(KV)
        return self._bare_prefix.keys(hashes) if pool is None else pool.keys(hashes)

    def _of_pages(self, outcomes: Outcomes) -> Outcomes:
        pool = self._pools.get(KV)
        return outcomes if pool is None else pool.of_pages(outcomes)


def _leading(outcomes: Outcomes) -> int:
    missing = np.flatnonzero(outcomes != Outcome.HIT)
    return int(missing[0]) if len(missing) else len(outcomes)


def _as_bools(outcomes: Outcomes) -> list[bool]:
    return [outcome == Outcome.HIT for outcome in outcomes.tolist()]
