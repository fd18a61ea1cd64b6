"""A vLLM without a model: its scheduler's rules, whole and strict, over the caches of ``vllm_fakes.py``.

A block's bytes are a function of all tokens up to its end, as KV is, and of the group of layers that it belongs to. All
groups take their blocks from one pool and have them in one memory, so that wrong KV shows. Whoever reports a transfer
that vLLM does not wait for trips the same assertion that ends a real engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from p2pkv import Node
from p2pkv.config import Config
from p2pkv.integrations.vllm import P2PKVConnector
from p2pkv.integrations.vllm_connector.messages import StepReport
from p2pkv.integrations.vllm_connector.weights import Weights
from vllm_fakes import (
    BLOCK,
    LAYERS,
    SHAPE,
    BlockFake,
    BlockPoolFake,
    DeviceMemory,
    FullAttentionSpec,
    RequestFake,
    caches,
    expected,
    kv_cache_config,
    looked_at,
    vllm_config,
)

_STATUS = {name: SimpleNamespace(name=name) for name in ("FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED")}


class EngineFake:
    """One instance: a scheduler's connector, a worker's, and vLLM's rules between them."""

    loads_by_layer = False
    """Whether steps may compute with what they load (``vllm_layers.py``)."""

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        role: str = "kv_both",
        policy: str = "recompute",
        kinds: Sequence[str] = ("full",),
        chunk: int = 1 << 20,
        n_blocks: int = 64,
        keeps_blocks: bool = True,
        n_layers: int = LAYERS,
        dtype: str = "float32",
        shape: tuple[int, int, int] = SHAPE,
        order: tuple[int, ...] = (0, 1, 2, 3, 4),
        start_node: Callable[[Config], Node] = Node.start,
        allocate: Callable[[int], DeviceMemory] | None = None,
        told: Weights | None = None,
        tells_events: bool = False,
    ) -> None:
        """``told``: what the connector knows of its weights; by default it is never told any.

        ``tells_events``: whether KV events are on.

        ``kinds``: of its groups of layers (:data:`SPECS`). ``chunk``: tokens that one step computes of a prompt.

        ``keeps_blocks`` off is an engine that frees blocks although somebody may still read them.

        ``allocate``: makes the device memory that the caches are in.

        ``shape``: heads, tokens and width of a block; one head is MLA. ``order``: in which of layers, blocks, heads,
        tokens and width the caches lie, from the outermost.
        """
        config = vllm_config(settings, role, policy)
        config.model_config.use_mla = shape[0] == 1
        config.kv_events_config = SimpleNamespace(enable_kv_cache_events=tells_events)
        cache_config = kv_cache_config(n_blocks=n_blocks, kinds=kinds, n_layers=n_layers)
        self.nodes: list[Node] = []

        def start(config: Config) -> Node:
            self.nodes.append(start_node(config))
            return self.nodes[-1]

        whole = (n_layers, n_blocks, *shape)
        self._storage = np.zeros([whole[dimension] for dimension in order], dtype)
        self._blocks = self._storage.transpose(np.argsort(order))
        self.memory = None if allocate is None else allocate(self._storage.nbytes)
        self.weights = 0
        """Which it really has: KV depends on it."""
        self.pool = BlockPoolFake(n_blocks)
        self._specs = [group.kv_cache_spec for group in cache_config.kv_cache_groups]
        options = {
            "start_node": start,
            "current_stream": self._current_stream,
            "weights": Weights() if told is None else told,
        }
        self.scheduler, self.worker = (
            P2PKVConnector(config, None, cache_config, **options) for _ in range(2)
        )
        place = ("cpu", None) if self.memory is None else ("cuda", self.memory.address)
        self.worker.register_kv_caches(
            {
                name if len(kinds) == 1 else f"{group}.{name}": tensor
                for group in range(len(kinds))
                for name, tensor in caches(self._blocks, *place).items()
            }
        )
        self.scheduler.bind_gpu_block_pool(self.pool if keeps_blocks else _Careless(self.pool))
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        assert self.worker.node is not None
        self.node, self._policy, self._keeps_blocks = self.worker.node, policy, keeps_blocks
        self._chunk = chunk
        self.in_step: set[str] = set()
        """Requests that this step loads and computes with."""
        self.requests: dict[str, RequestFake] = {}
        self._n_submitted = 0
        self._preempted: set[str] = set()
        self.counts: dict[str, int] = {}
        self.errors: list[str] = []
        self.wrong: list[str] = []
        """Requests that were computed from KV that is not theirs."""

    @property
    def member(self) -> Node:
        """The worker's node that makes and takes offers."""
        assert self.worker._worker is not None
        return self.worker._worker.nodes.member

    @property
    def free(self) -> list[int]:
        """Blocks that the engine may give out, in this order."""
        return self.pool.free

    @property
    def is_idle(self) -> bool:
        """Whether all requests are over, and nobody reads a block any more."""
        return not self.requests and not self.scheduler.has_pending_push_work()

    def submit(
        self,
        tokens: list[int],
        params: dict[str, Any] | None = None,
        *,
        n_local: int = 0,
        name: str = "request",
    ) -> RequestFake:
        """Add a request; ``n_local`` of its tokens are in the engine's own prefix cache."""
        self._n_submitted += 1
        request = RequestFake(f"{name}-{self._n_submitted}-{id(self)}", tokens, params)
        request.n_local = n_local
        self.requests[request.request_id] = request
        self.scheduler.on_new_request(request)
        return request

    def run(self, request: RequestFake, seconds: float = 90.0) -> RequestFake:
        """Step until a request has finished."""
        return self.step_until(lambda: request.state == "finished", seconds) and request

    def step_until(self, condition: Callable[[], bool], seconds: float = 90.0) -> Any:
        """Step until ``condition`` holds."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"not so within {seconds} s"
            self.step()
            time.sleep(0.001)  # as vLLM's busy loop does when nothing runs
        return True

    def output(self, scheduled: dict[str, int]) -> SimpleNamespace:
        """Return what vLLM's scheduler tells connectors of a step."""
        preempted, self._preempted = self._preempted, set()
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            preempted_req_ids=preempted,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda r: tuple(map(list, self.requests[r].tables))
            ),
        )

    def step(self) -> None:
        """One step of vLLM's engine core."""
        scheduled = {r.request_id: n for r in list(self.requests.values()) if (n := self._schedule(r))}
        output = self.output(scheduled)
        metadata = self.scheduler.build_connector_meta(output)
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self._forward(scheduled)
        self.worker.wait_for_save()
        sent, received, failed = self.worker.get_transfer_results(set())
        invalid = self.worker.get_block_ids_with_load_errors()
        stats = self.worker.get_kv_connector_stats()
        report = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        for name, n in (stats.reduce() if stats is not None else {}).items():
            self.counts[name] = self.counts.get(name, 0) + n
        assert not invalid or len(self._specs) == 1, "ends a real engine: block ids are of no group"
        self._invalidate(invalid)
        self._fail(failed)
        for request in [self.requests[name] for name in scheduled if name in self.requests]:
            if request.num_computed_tokens == request.num_tokens and not request.runs_on:
                self._finish(request, "FINISHED_LENGTH_CAPPED")
        assert report is None or isinstance(report, StepReport)
        heard = SimpleNamespace(
            kv_connector_worker_meta=report, finished_recving=received, invalid_block_ids=invalid
        )
        self.scheduler.update_connector_output(heard)
        self._end_transfers(sent, received)

    def _forward(self, scheduled: dict[str, int]) -> None:
        for request_id, n_tokens in scheduled.items():
            self._compute(self.requests[request_id], n_tokens)
        self.worker.start_load_kv(None)

    def _schedule(self, request: RequestFake) -> int:
        if request.state == "running" and request.num_computed_tokens < request.num_tokens:
            return self._allot(request)
        if request.state != "waiting":
            return 0
        n_external, is_async = 0, False
        if request.num_computed_tokens == 0:
            matched, is_async = self.scheduler.get_num_new_matched_tokens(request, request.n_local)
            if matched is None:
                return 0
            n_external = matched
            assert is_async == bool(n_external) or self.loads_by_layer
        is_first = request.num_computed_tokens == 0
        n_computed = request.n_local + n_external if is_first else request.num_computed_tokens
        assert n_computed <= request.num_tokens
        self._allocate(request, n_computed, n_computed if is_async else self._end(request, n_computed))
        if is_first:
            for number, spec in enumerate(self._specs):
                for block in looked_at(spec, n_computed):
                    if (block + 1) * spec.block_size <= request.n_local:
                        # what the engine's own prefix cache would hold there
                        self._write(request, number, block, request.n_local)
        blocks = SimpleNamespace(get_block_ids=lambda: tuple(map(list, request.tables)))
        self.scheduler.update_state_after_alloc(request, blocks, n_external)
        request.num_computed_tokens = n_computed
        if is_async:
            request.state, request.loaded_tokens = "loading", n_external
            return 0
        if n_external:
            assert n_computed < request.num_tokens, "ends a real engine: there is nothing to compute"
            request.loaded_tokens = n_external
            self.in_step.add(request.request_id)
        request.state = "running"
        request.num_computed_tokens = min(n_computed, request.num_tokens - 1)
        return self._end(request, request.num_computed_tokens) - request.num_computed_tokens

    def _end(self, request: RequestFake, n_computed: int) -> int:
        return min(request.num_tokens, n_computed + self._chunk)

    def _allot(self, request: RequestFake) -> int:
        """Go on with a request of which a part is computed."""
        n_computed = request.num_computed_tokens
        self._allocate(request, n_computed, self._end(request, n_computed))
        return self._end(request, n_computed) - n_computed

    def _allocate(self, request: RequestFake, n_computed: int, n_tokens: int) -> None:
        """Let go what tokens after ``n_computed`` look back at no more, and make room for ``n_tokens``."""
        request.tables = request.tables or [[] for _ in self._specs]
        for spec, table in zip(self._specs, request.tables, strict=True):
            needed = looked_at(spec, n_computed)
            first = needed.start if needed else n_computed // spec.block_size
            for block in range(min(first, len(table))):
                self.pool.give_back([table[block]])
                table[block] = 0
            while len(table) < -(-n_tokens // spec.block_size):
                table.append(self.pool.take() if len(table) >= first else 0)

    def _compute(self, request: RequestFake, n_tokens: int) -> None:
        n_before = request.num_computed_tokens
        self._look_back(request, n_before)
        request.num_computed_tokens = n_before + n_tokens
        for number, (spec, table) in enumerate(zip(self._specs, request.tables, strict=True)):
            for block in range(n_before // spec.block_size, len(table)):
                self._write(request, number, block, request.num_computed_tokens)

    def _look_back(self, request: RequestFake, n_tokens: int) -> None:
        """Take down whether what the next token is computed from is the request's KV."""
        # the last token may be computed again over KV that has it already, where all blocks are kept
        n_written = max(n_tokens, request.n_local + request.loaded_tokens) if self._keeps_all else n_tokens
        if not self._holds(request, n_tokens, n_written):
            self.wrong.append(request.request_id)

    @property
    def _keeps_all(self) -> bool:
        return all(isinstance(spec, FullAttentionSpec) for spec in self._specs)

    def _holds(self, request: RequestFake, n_tokens: int, n_written: int) -> bool:
        """Whether the blocks are there that tokens after ``n_tokens`` need, as they are after ``n_written``."""
        self._from_device()
        for number, (spec, table) in enumerate(zip(self._specs, request.tables, strict=True)):
            for block in looked_at(spec, n_tokens):
                kv = self._expected(request, number, block, n_written)
                if not table[block] or (self._blocks[:, table[block]] != kv).any():
                    return False
        return True

    def _current_stream(self, device: object) -> int:
        assert self.memory is not None
        return self.memory.stream

    def _write(self, request: RequestFake, group: int, block: int, n_tokens: int) -> None:
        self._from_device()
        block_id = request.tables[group][block]
        if not block_id:
            return  # a window that moved on within the step
        self._blocks[:, block_id] = self._expected(request, group, block, n_tokens)
        if self.memory is not None:
            self.memory.write(self._storage.view(np.uint8))

    def _from_device(self) -> None:
        """Have the caches' bytes in ``_blocks``."""
        if self.memory is not None:
            self._storage[:] = self.memory.read().view(self._storage.dtype).reshape(self._storage.shape)

    def _expected(self, request: RequestFake, group: int, block: int, n_tokens: int) -> np.ndarray:
        end = min((block + 1) * self._specs[group].block_size, n_tokens)
        shape = (len(self._blocks), *self._blocks.shape[2:])
        kv = expected(request._all_token_ids[:end], shape, self.weights, group)
        return kv.astype(self._blocks.dtype)

    def is_right(self, request: RequestFake, n_blocks: int | None = None) -> bool:
        """Whether a request's blocks hold its KV, or what goes on after so many blocks of tokens needs of it."""
        assert request.block_ids
        n_tokens = request.n_local + request.loaded_tokens
        if n_blocks is not None:
            n_tokens = n_blocks * BLOCK
        elif self._keeps_all:
            n_tokens = len(request._all_token_ids)
        return self._holds(request, n_tokens, n_tokens)

    def overwrite(self, block_ids: list[int]) -> None:
        """Put other KV into blocks, as the next request would that is given them."""
        assert set(block_ids) <= set(self.free), "an engine gives out only what is free"
        self._blocks[:, block_ids] = -1

    def _invalidate(self, invalid: set[int]) -> None:
        for request in self.requests.values():
            bad = [i for i, block_id in enumerate(request.block_ids) if block_id in invalid]
            if bad and request.state == "loading":
                request.loaded_tokens = max(0, bad[0] * BLOCK - request.n_local)
                request.num_computed_tokens = bad[0] * BLOCK
                self._recover(request, keeps=bad[0] > 0)

    def _fail(self, failed: set[str]) -> None:
        for request_id in failed:
            request = self.requests.get(request_id)
            if request is not None and request.state == "loading":
                request.loaded_tokens = request.num_computed_tokens = 0
                self._recover(request, keeps=False)

    def _recover(self, request: RequestFake, *, keeps: bool) -> None:
        if self._policy == "fail":
            self.errors.append(request.request_id)
        elif not keeps:
            self._give_back(request)

    def _give_back(self, request: RequestFake) -> None:
        for table in request.tables:
            self.pool.give_back(table)
        request.tables = []

    def _end_transfers(self, sent: set[str], received: set[str]) -> None:
        for request_id in received:
            assert request_id in self.requests, "ends a real engine"
            request = self.requests[request_id]
            if request.state == "loading":
                request.state = "waiting"
                if request_id in self.errors:
                    self.abort(request)
            else:
                assert request.state == "finished"
                self._free(request)
        for request_id in sent:
            assert request_id in self.requests, "ends a real engine"
            assert self.requests[request_id].state == "finished"
            self._free(self.requests[request_id])

    def abort(self, request: RequestFake) -> None:
        """End a request from outside."""
        self._finish(request, "FINISHED_ABORTED")

    def _finish(self, request: RequestFake, status: str) -> None:
        was_loading = request.state == "loading"
        request.n_output = int(status == "FINISHED_LENGTH_CAPPED")
        request.state, request.status = "finished", _STATUS[status]
        tables = tuple(map(list, request.tables or [[] for _ in self._specs]))
        keep, request.answer = self.scheduler.request_finished_all_groups(request, tables)
        if not was_loading and not (keep and self._keeps_blocks):
            self._free(request)

    def _free(self, request: RequestFake) -> None:
        tables = request.tables
        self._give_back(request)
        request.tables = tables  # to look at
        del self.requests[request.request_id]

    def preempt(self, request: RequestFake) -> None:
        """Take a running request's blocks away; it does not run again before somebody says so."""
        self._give_back(request)
        request.num_computed_tokens, request.state = 0, "preempted"
        self._preempted.add(request.request_id)

    def close(self) -> None:
        """Shut down both halves."""
        self.scheduler.shutdown()
        self.worker.shutdown()


class _Careless:
    """A pool that gives out blocks although somebody holds them."""

    def __init__(self, pool: BlockPoolFake) -> None:
        self.blocks = pool.blocks

    def touch(self, blocks: Sequence[BlockFake]) -> None:
        """Do nothing."""

    free_blocks = touch
