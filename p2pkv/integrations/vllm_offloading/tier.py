"""vLLM's offloading keeps a further tier in a p2pkv cluster: chunks of its host memory that others can have, too.

Load it as one of ``secondary_tiers`` of vLLM's ``TieringOffloadingSpec``; ``docs/vllm.md`` has the command line. vLLM
makes one in its scheduler, in whose process the tier has a node; chunks go straight between vLLM's host memory and the
cluster. No exception reaches the scheduler once it runs: what goes wrong is a chunk that is not there, counted, and
logged, each cause once a minute. Errors at start are raised: vLLM does not start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pkv.attach.auto import decided
from p2pkv.config import Config
from p2pkv.errors import ConfigError
from p2pkv.integrations.boundary import Boundary, guarded
from p2pkv.integrations.engine import numbered
from p2pkv.integrations.vllm_connector.settings import OWN_EVENTS
from p2pkv.integrations.vllm_connector.weights import Weights, watch
from p2pkv.integrations.vllm_offloading import installed
from p2pkv.integrations.vllm_offloading.events import ChunkEvents
from p2pkv.integrations.vllm_offloading.installed import JobResult, LookupResult, TierBase, TransferJob
from p2pkv.integrations.vllm_offloading.jobs import Done, Job, Jobs, pieces_of
from p2pkv.integrations.vllm_offloading.lookups import Lookups
from p2pkv.integrations.vllm_offloading.naming import namespace
from p2pkv.node import Node
from p2pkv.page import Outcome, Outcomes, Pieces

_HOST_KEYS = frozenset({"locality"})
"""Keys of a tier's configuration that are vLLM's."""


class P2PKVTier(TierBase):
    """A secondary tier over a node, which is its ``node``. Used by the scheduler's thread, which it never blocks.

    A chunk that can't be had is a miss whatever the reason.
    """

    medium = None  # memory and disks, of this machine and of others
    cache_hit_source = installed.HIT_SOURCE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        start_node: Callable[[Config], Node] = Node.start,
        weights: Weights | None = None,
        **settings: object,
    ) -> None:
        """Start the node and join its cluster; ``settings`` are those of a node. Raises the errors of both."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        installed.log_with_the_engine()
        self._weights = Weights() if weights is None else weights
        watch(self._weights)
        chunks = np.asarray(primary_kv_view)
        if chunks.ndim != 2 or not chunks.flags.c_contiguous:
            raise ConfigError(f"vLLM's host memory is no rows of chunks, but {chunks.shape} {chunks.strides}")
        self._address, self._chunk_nbytes = chunks.ctypes.data, int(chunks.strides[0])
        config = decided(Config.load(settings, host_keys=_HOST_KEYS))
        name = namespace(offloading_spec.config, config.namespace, self._chunk_nbytes)
        index = offloading_spec.config.parallel.data_parallel_index
        tells_events = offloading_spec.kv_events_config.enable_kv_cache_events
        own_events = OWN_EVENTS if tells_events and not config.attach else ""
        config = replace(config, namespace=name, kv_events=config.kv_events or own_events)
        self.node = start_node(numbered(config, index, tag="-"))
        with ExitStack() as undo:
            undo.callback(self.node.close)
            self._events = ChunkEvents(self.node) if tells_events else None
            self._memory = self.node.register_address(self._address, chunks.nbytes, chunks)
            undo.pop_all()
        self.boundary = Boundary("vLLM's offloading", self.node.metrics)
        self._lookups = Lookups(self._exist)
        self._jobs = Jobs(self._fetch, self._publish, self.boundary)

    # --- what is there

    @guarded("exists", miss=LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Say whether some node has a chunk, or that it is being asked."""
        is_there = self._lookups.found(req_context.req_id, self._weights.name + key)
        if is_there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_there else LookupResult.MISS

    def _exist(self, names: Sequence[bytes]) -> NDArray[np.bool_]:
        outcomes = self.boundary.call("exists", lambda: self.node.exists(names), miss=None)
        return np.zeros(len(names), np.bool_) if outcomes is None else outcomes == Outcome.HIT

    def on_new_request(self, req_context: Any) -> Any:
        """Return that what is new of it is to be stored."""
        return installed.request_policy()

    @guarded("forget", miss=None)
    def on_request_finished(self, req_context: Any) -> None:
        """Forget what was asked for it."""
        self._lookups.forget(req_context.req_id)

    @guarded("exists", miss=None)
    def on_schedule_end(self, context: Any) -> None:
        """Ask for what this step wanted to know."""
        self._lookups.ask()

    # --- what moves

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Have chunks of vLLM's host memory published."""
        self._jobs.start(self._job(job_metadata, is_load=False))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Have chunks fetched into vLLM's host memory."""
        self._jobs.start(self._job(job_metadata, is_load=True))

    def _job(self, told: TransferJob, *, is_load: bool) -> Job:
        keys = tuple(told.keys)
        names = [self._weights.name + key for key in keys]
        pieces = pieces_of(self._address, self._chunk_nbytes, told.chunk_ids)
        return Job(told.job_id, is_load, keys, names, pieces, self.node.epoch)

    def _fetch(self, job: Job, some: slice) -> Outcomes:
        return self.node.fetch(job.names[some], Pieces(job.pieces.array[some]))

    def _publish(self, job: Job, some: slice) -> Outcomes:
        """Publish what nobody has: vLLM stores what it has just been brought, too."""
        names, pieces = job.names[some], job.pieces.array[some]
        if self._events is not None:
            self._events.name(job.keys[some], names, job.epoch)
        outcomes = self.node.exists(names)
        missing = np.flatnonzero(outcomes != Outcome.HIT)
        if len(missing):
            theirs = Pieces(pieces[missing])
            outcomes[missing] = self.node.publish(
                [names[i] for i in missing.tolist()], theirs, epoch=job.epoch
            )
        return outcomes

    @guarded("events", miss=())
    def take_events(self) -> Iterable[Any]:
        """Return what vLLM's KV events are to tell of chunks in the node's memory and on its disk."""
        return () if self._events is None else list(self._events.take())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call."""
        return [self._result(done) for done in self._jobs.take_done()]

    def _result(self, done: Done) -> JobResult:
        moved = [key for key, has_moved in zip(done.job.keys, done.has_moved, strict=True) if has_moved]
        is_whole = len(moved) == len(done.job.keys)
        if done.job.is_load and not is_whole:
            self._lookups.missed(
                [n for n, moved_it in zip(done.job.names, done.has_moved, strict=True) if not moved_it]
            )
        return JobResult(
            done.job.number,
            is_whole,
            successful_keys=tuple(moved) if done.job.is_load and moved and not is_whole else None,
            transfer_time=done.seconds,
            transfer_bytes=len(moved) * self._chunk_nbytes,
        )

    def drain_jobs(self) -> None:
        """Block until no job touches vLLM's host memory; vLLM forgets its KV, and the weights have changed.

        What was stored so far is found no more by this server, and by others that are told so (:class:`Weights`).
        """
        self._jobs.drain()
        self._weights.reset()
        self._lookups.reset()

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Do nothing: the pages that are fetched are those that stay."""

    # --- the end

    def shutdown(self) -> None:
        """Leave the cluster. Idempotent; takes a deadline and a little more."""
        self._memory.close()
        self.node.close()
        self._lookups.close()
        self._jobs.close()
