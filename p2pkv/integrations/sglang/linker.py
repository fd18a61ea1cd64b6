"""SGLang's cache linker over p2pkv: KV goes between device memory and the cluster, past SGLang's host memory.

Load it with ``--unified-cache-external-linker-backend dynamic``; ``docs/sglang.md`` has the command line. Each
scheduler process has a node of its own.

SGLang answers a request whose load fails with an error, where HiCache would compute it. Only a load that is refused
when it is queued costs nothing but that. So pages are fetched then, within :meth:`P2PKVLinker.load`: what does not come
to every rank is computed, and a dead owner costs misses, here too. The price is that nothing is computed meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from p2pkv.config import Config
from p2pkv.integrations.boundary import Boundary, guarded
from p2pkv.integrations.sglang.device_group import Offered, offered_by
from p2pkv.integrations.sglang.device_pools import DevicePool
from p2pkv.integrations.sglang.heartbeat import announce_server
from p2pkv.integrations.sglang.installed import batch_pages, find
from p2pkv.integrations.sglang.offloads import Offloads
from p2pkv.integrations.sglang.pools import Indices
from p2pkv.integrations.sglang.settings import Rank, node_config
from p2pkv.integrations.sglang.side_pools import PoolTransfer, served
from p2pkv.integrations.sglang.weights import Weights
from p2pkv.integrations.sglang.weights import served as served_weights
from p2pkv.node import Node
from p2pkv.page import Outcome, Pieces
from p2pkv.tracing import about

if TYPE_CHECKING:

    class LinkerBase:
        """The part of SGLang's class that is relied on."""

        def record_offload_ready(self) -> Sequence[Any]:
            """Return events after which what is to be stored has been computed."""

else:
    LinkerBase = (
        find("sglang.srt.mem_cache.unified_cache.unified_cache_linker", "UnifiedCacheLinker") or object
    )

_KV = "kv"
_NOTHING_LOADS = -1
"""The number of a batch of loads that SGLang does not wait for."""


@dataclass(frozen=True, slots=True)
class _Offload:
    """Pages to store, by pool; their keys are those of the weights, and their epoch that of the time they were told."""

    pages: list[tuple[DevicePool, list[str], Indices | None]]
    ready: Sequence[Any]
    """Events after which the pages' bytes are there."""
    epoch: int


class P2PKVLinker(LinkerBase):
    """A cache linker of SGLang over a node, which is its ``node``. Called by SGLang's main thread only.

    A page that can't be had is a miss whatever the reason.
    """

    def __init__(
        self,
        server_args: object,
        params: Any,
        *,
        components: Collection[Any],
        extra_config: Mapping[str, object] | None = None,
        forward_stream: Any = None,
        offered: Offered | None = None,
        start_node: Callable[[Config], Node] = Node.start,
        weights: Weights | None = None,
    ) -> None:
        """Start the node and join its cluster. Errors of the configuration are raised here: SGLang does not start."""
        del server_args  # all that matters of it is in SGLang's runtime context
        self.forward_stream = forward_stream
        self._offered = offered_by(params, components, extra_config) if offered is None else offered
        self.pools = self._offered.group.entry_map
        self.layer_done_counter = self._offered.layer_counter
        self._weights = served_weights() if weights is None else weights
        config = self._offered.storage_config
        # states that are each rank's own don't stand in the way here: then SGLang says that no rank has another's pages
        self._rank = dataclasses.replace(Rank.read(config), writes=getattr(config, "is_storage_writer", True))
        self._device_pools = {
            str(name): DevicePool(entry, str(name), self._rank, self._weights, halves=self._offered.halves)
            for name, entry in self.pools.items()
        }
        self._config = node_config(config, self._rank)
        self.node = start_node(self._config)
        with ExitStack() as undo:
            undo.callback(self.node.close)
            self._register()
            undo.pop_all()
        self.boundary = Boundary("SGLang linker", self.node.metrics)
        self._offloads = Offloads(self._store)
        self._fetched: set[str] = set()  # requests of the batch that is being made, whose pages have come
        self._weights.on_change(self._announce)
        self._announce()

    def _register(self) -> None:
        memories = {r.address: r for pool in self._device_pools.values() for r in pool.ranges}
        for memory in memories.values():
            self.node.register_address(memory.address, memory.nbytes, memory.owner)

    def _announce(self) -> None:
        """Tell routers of this server, and what its pages' keys are made of."""
        kv = self._device_pools.get(_KV)
        announce_server(
            self._config,
            self._rank.index,
            node_id=self.node.owner_id,
            namespace=self._config.namespace,
            page_size=kv.page_size if kv is not None else 0,
            key_prefix=str(kv.prefix) if kv is not None else "",
        )

    # --- from the cluster to the device

    @guarded("exists", miss=[])
    def lookup(self, rid: str, transfers: Sequence[PoolTransfer]) -> list[int]:
        """Return how many pages may be taken, all lengths that every pool can serve; one look-up round for all."""
        with about(rid):
            pages = self._offered.group.resolve_transfers(transfers)
            hashes = next((t.keys for t in transfers if str(t.name) == _KV), None)
            if not pages or not hashes:
                return []
            return served(self.node, self._device_pools, hashes, pages).restorable_prefix_pages

    def load(self, rid: str, transfers: Sequence[PoolTransfer]) -> bool:
        """Fetch pages to where SGLang wants them; True if all came, on all ranks. Otherwise SGLang computes them.

        Blocks for ``deadline`` at most for each batch of pages, until the first that does not come.
        """
        with about(rid):
            has_come = self._fetch(transfers)
        if not self._offered.agree(has_come):
            return False
        self._fetched.add(rid)
        return True

    @guarded("get", miss=False)
    def _fetch(self, transfers: Sequence[PoolTransfer]) -> bool:
        pages = self._offered.group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        for transfer in pages:
            pool, hashes = self._device_pools[str(transfer.name)], transfer.keys or ()
            keys, pieces = pool.keys(hashes), pool.pieces(len(hashes), transfer.host_indices)
            for some, theirs in _batches(keys, pieces):
                outcomes = self.node.fetch(some, theirs, stream=self._offered.stream())
                if not (outcomes == Outcome.HIT).all():
                    return False
        return bool(pages)

    def start_layer_wise_loading(self) -> int:
        """Return that there is nothing to wait for: what was queued has come."""
        self._fetched.clear()
        return _NOTHING_LOADS

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Return that all is there."""
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Return whether this request was to be part of the next batch; nothing writes to its memory."""
        if rid not in self._fetched:
            return False
        self._fetched.remove(rid)
        return True

    # --- from the device to the cluster

    def offload(self, transfers: Sequence[PoolTransfer], session_id: str | None = None) -> bool:
        """Queue pages to be stored; SGLang keeps them until :meth:`pop_completed_offload` has answered. Never blocks.

        The result and the number of answers are the same on all ranks, whatever fails.
        """
        pages = self._offered.group.resolve_transfers(transfers, allow_partial=True)
        if not pages:
            return False
        self._offloads.submit(self._described(pages) if self._rank.writes else None)
        return True

    def _described(self, pages: Sequence[PoolTransfer]) -> _Offload:
        pools = [(self._device_pools[str(page.name)], page) for page in pages]
        return _Offload(
            pages=[(pool, pool.keys(page.keys or ()), page.host_indices) for pool, page in pools],
            ready=self.record_offload_ready(),
            epoch=self.node.epoch,
        )

    @guarded("set", miss=False)
    def _store(self, offload: _Offload, is_wanted: Callable[[], bool]) -> bool:
        """Publish what nobody has: SGLang wants pages stored that it has just been brought, too."""
        for event in offload.ready:
            event.synchronize()
        for pool, keys, indices in offload.pages:
            for some, pieces in _batches(keys, pool.pieces(len(keys), indices)):
                if not is_wanted():
                    return False
                missing = np.flatnonzero(self.node.exists(some) != Outcome.HIT)
                if not len(missing):
                    continue
                some, pieces = [some[i] for i in missing.tolist()], Pieces(pieces.array[missing])
                if not (self.node.publish(some, pieces, epoch=offload.epoch) == Outcome.HIT).all():
                    return False
        return True

    def num_completed_offloads(self) -> int:
        """Return how many answers wait."""
        return len(self._offloads)

    def pop_completed_offload(self) -> bool:
        """Return whether the pages of the oldest :meth:`offload` without an answer can be fetched by any node now."""
        return self._offloads.pop()

    # --- the end

    def reset(self) -> None:
        """Forget what was queued; blocks until SGLang's memory is its own again, a deadline at most."""
        self._fetched.clear()
        self._offloads.reset()

    def close(self) -> None:
        """Leave the cluster. Idempotent; takes a deadline and a little more."""
        self._weights.forget(self._announce)
        self._offloads.close()
        self.node.close()


def _batches(keys: list[str], pieces: Pieces) -> list[tuple[list[str], Pieces]]:
    """Return pages in batches as long as HiCache's, each of which gets a deadline of its own."""
    n = batch_pages()
    return [(keys[i : i + n], Pieces(pieces.array[i : i + n])) for i in range(0, len(keys), n)]
