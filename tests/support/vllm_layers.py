"""A vLLM whose steps compute with what they load: layer after layer, each when it is there.

A step that has such a load computes one layer of all its requests after the other. Whoever computes with other KV than
his own, and is not told in the same step that his load has failed, is taken down as ``wrong``: a real engine would have
answered with it.
"""

from __future__ import annotations

from vllm_engine import EngineFake
from vllm_fakes import BLOCK, RequestFake, looked_at


class LayerEngineFake(EngineFake):
    """An instance with ``layer_deadline``; of models of one group of full attention."""

    loads_by_layer = True

    def _forward(self, scheduled: dict[str, int]) -> None:
        self._misled: set[str] = set()
        self._scheduled = scheduled
        if not self.in_step:
            super()._forward(scheduled)
            return
        self.worker.start_load_kv(None)
        for layer in range(len(self._blocks)):
            self.worker.wait_for_layer_load(f"layers.{layer}")
            for request_id, n_tokens in scheduled.items():
                self._compute_layer(self.requests[request_id], n_tokens, layer)
        for request_id, n_tokens in scheduled.items():
            self.requests[request_id].num_computed_tokens += n_tokens

    def _compute_layer(self, request: RequestFake, n_tokens: int, layer: int) -> None:
        n_before = request.num_computed_tokens
        n_written = max(n_before, request.n_local + request.loaded_tokens)
        (table,) = request.tables
        for block in looked_at(self._specs[0], n_before):
            if (
                self._blocks[layer, table[block]] != self._expected(request, 0, block, n_written)[layer]
            ).any():
                self._misled.add(request.request_id)
        for block in range(n_before // BLOCK, len(table)):
            kv = self._expected(request, 0, block, n_before + n_tokens)
            self._blocks[layer, table[block]] = kv[layer]

    def _invalidate(self, invalid: set[int]) -> None:
        super()._invalidate(invalid)
        told = set()
        for request_id, n_tokens in self._scheduled.items():
            request = self.requests[request_id]
            n_before = request.num_computed_tokens - n_tokens
            bad = [i for i in range(-(-n_before // BLOCK)) if request.block_ids[i] in invalid]
            if bad:
                told.add(request_id)
                request.num_computed_tokens = bad[0] * BLOCK
                request.loaded_tokens = max(0, bad[0] * BLOCK - request.n_local)
                if self._policy == "fail":
                    self.errors.append(request_id)
                    self.abort(request)
        self.wrong += self._misled - told
        self.in_step.clear()
