"""A vLLM without a model: its scheduler's rules, whole and strict, over the caches of ``vllm_fakes.py``.

A block's bytes are a function of all tokens up to its end, as KV is. Whoever reports a transfer that vLLM does not
wait for trips the same assertion that ends a real engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from p2pkv import Node
from p2pkv.config import Config
from p2pkv.integrations.vllm import P2PKVConnector
from p2pkv.integrations.vllm_connector.weights import Weights
from vllm_fakes import (
    BLOCK,
    LAYERS,
    SHAPE,
    DeviceMemory,
    RequestFake,
    caches,
    expected,
    kv_cache_config,
    vllm_config,
)

_STATUS = {name: SimpleNamespace(name=name) for name in ("FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED")}


class EngineFake:
    """One instance: a scheduler's connector, a worker's, and vLLM's rules between them."""

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        role: str = "kv_both",
        policy: str = "recompute",
        n_blocks: int = 64,
        keeps_blocks: bool = True,
        n_layers: int = LAYERS,
        dtype: str = "float32",
        start_node: Callable[[Config], Node] = Node.start,
        allocate: Callable[[int], DeviceMemory] | None = None,
        told: Weights | None = None,
    ) -> None:
        """``told``: what the connector knows of its weights; by default it is never told any.

        ``keeps_blocks`` off is an engine that frees blocks although somebody may still read them.

        ``allocate``: makes the device memory that the caches are in.
        """
        config, cache_config = vllm_config(settings, role, policy), kv_cache_config(n_blocks=n_blocks)
        self.nodes: list[Node] = []

        def start(config: Config) -> Node:
            self.nodes.append(start_node(config))
            return self.nodes[-1]

        self._blocks = np.zeros((n_layers, n_blocks, *SHAPE), dtype)
        self.memory = None if allocate is None else allocate(self._blocks.nbytes)
        self.weights = 0
        """Which it really has: KV depends on it."""
        options = {
            "start_node": start,
            "current_stream": self._current_stream,
            "weights": Weights() if told is None else told,
        }
        self.scheduler, self.worker = (
            P2PKVConnector(config, None, cache_config, **options) for _ in range(2)
        )
        if self.memory is None:
            self.worker.register_kv_caches(caches(self._blocks))
        else:
            self.worker.register_kv_caches(caches(self._blocks, "cuda", self.memory.address))
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        assert self.worker.node is not None
        self.node, self._policy, self._keeps_blocks = self.worker.node, policy, keeps_blocks
        self.free = list(range(n_blocks))
        self.requests: dict[str, RequestFake] = {}
        self._preempted: set[str] = set()
        self.counts: dict[str, int] = {}
        self.errors: list[str] = []

    def submit(
        self,
        tokens: list[int],
        params: dict[str, Any] | None = None,
        *,
        n_local: int = 0,
        name: str = "request",
    ) -> RequestFake:
        """Add a request; ``n_local`` of its tokens are in the engine's own prefix cache."""
        request = RequestFake(f"{name}-{len(self.requests)}-{id(tokens)}", tokens, params)
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
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda r: (self.requests[r].block_ids,)),
        )

    def step(self) -> None:
        """One step of vLLM's engine core."""
        scheduled = {r.request_id: n for r in list(self.requests.values()) if (n := self._schedule(r))}
        output = self.output(scheduled)
        metadata = self.scheduler.build_connector_meta(output)
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        for request_id, n_tokens in scheduled.items():
            self._compute(self.requests[request_id], n_tokens)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        sent, received, failed = self.worker.get_transfer_results(set())
        invalid = self.worker.get_block_ids_with_load_errors()
        stats = self.worker.get_kv_connector_stats()
        self.worker.clear_connector_metadata()
        for name, n in (stats.reduce() if stats is not None else {}).items():
            self.counts[name] = self.counts.get(name, 0) + n
        assert not failed
        self._invalidate(invalid)
        for request_id in scheduled:
            if not self.requests[request_id].runs_on:
                self._finish(self.requests[request_id], "FINISHED_LENGTH_CAPPED")
        self._end_transfers(sent, received)

    def _schedule(self, request: RequestFake) -> int:
        if request.state != "waiting":
            return 0
        n_external, is_async = 0, False
        if request.num_computed_tokens == 0:
            matched, is_async = self.scheduler.get_num_new_matched_tokens(request, request.n_local)
            if matched is None:
                return 0
            n_external = matched
            assert is_async == bool(n_external), "p2pkv loads in the background only"
        n_tokens = request.num_tokens if not is_async else request.n_local + n_external
        while len(request.block_ids) < -(-n_tokens // BLOCK):
            request.block_ids.append(self.free.pop(0))
        for block in range(request.n_local // BLOCK if request.num_computed_tokens == 0 else 0):
            self._write(request, block)  # what the engine's own prefix cache would hold there
        blocks = SimpleNamespace(get_block_ids=lambda: (request.block_ids,))
        self.scheduler.update_state_after_alloc(request, blocks, n_external)
        if request.num_computed_tokens == 0:
            request.num_computed_tokens = request.n_local + n_external
        if is_async:
            request.state, request.loaded_tokens = "loading", n_external
            return 0
        request.state = "running"
        return request.num_tokens - min(request.num_computed_tokens, request.num_tokens - 1)

    def _compute(self, request: RequestFake, n_tokens: int) -> None:
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - n_tokens)
        for block in range(request.num_computed_tokens // BLOCK, len(request.block_ids)):
            self._write(request, block)

    def _current_stream(self, device: object) -> int:
        assert self.memory is not None
        return self.memory.stream

    def _write(self, request: RequestFake, block: int) -> None:
        self._from_device()
        self._blocks[:, request.block_ids[block]] = self._expected(request, block)
        if self.memory is not None:
            self.memory.write(self._blocks.view(np.uint8))

    def _from_device(self) -> None:
        """Have the caches' bytes in ``_blocks``."""
        if self.memory is not None:
            self._blocks[:] = self.memory.read().view(self._blocks.dtype).reshape(self._blocks.shape)

    def _expected(self, request: RequestFake, block: int) -> np.ndarray:
        shape = (len(self._blocks), *SHAPE)
        kv = expected(request.prompt_token_ids, block, shape, self.weights)
        return kv.astype(self._blocks.dtype)

    def is_right(self, request: RequestFake, n_blocks: int | None = None) -> bool:
        """Whether a request's blocks, or the first of them, hold its KV."""
        assert request.block_ids
        self._from_device()
        return all(
            (self._blocks[:, block_id] == self._expected(request, block)).all()
            for block, block_id in enumerate(request.block_ids[:n_blocks])
        )

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
                if self._policy == "fail":
                    self.errors.append(request.request_id)
                elif not bad[0]:
                    self.free += request.block_ids
                    request.block_ids = []

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
        request.state, request.status = "finished", _STATUS[status]
        if status == "FINISHED_LENGTH_CAPPED":
            request.num_computed_tokens = request.num_tokens
        keep, request.answer = self.scheduler.request_finished(request, list(request.block_ids))
        if not was_loading and not (keep and self._keeps_blocks):
            self._free(request)

    def _free(self, request: RequestFake) -> None:
        self.free += request.block_ids
        del self.requests[request.request_id]

    def preempt(self, request: RequestFake) -> None:
        """Take a running request's blocks away; it does not run again before somebody says so."""
        self.free = request.block_ids + self.free  # the next one to need blocks has these
        request.block_ids, request.num_computed_tokens, request.state = [], 0, "preempted"
        self._preempted.add(request.request_id)

    def close(self) -> None:
        """Shut down both halves."""
        self.scheduler.shutdown()
        self.worker.shutdown()
