"""vLLM's offloading on a CPU, where vLLM itself refuses it: its own spec, with a worker that copies without a device.

Everything but the copies between the model's KV and the host memory is vLLM's: the connector, the scheduler's half, the
tiers, the region that they share.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies at once, on the thread that asks."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._caches, self._region = caches, region
        self._host = [region.create_next_worker_view(t.page_size_bytes) for t in caches.tensors]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def _copy(self, job_id: int, model: Any, host: Any, *, to_host: bool) -> bool:
        first = n_bytes = 0
        for refs, n in zip(self._caches.group_data_refs, model.group_sizes, strict=True):
            blocks = torch.from_numpy(model.block_ids[first : first + n]).long()
            chunks = torch.from_numpy(host.block_ids[first : first + n]).long()
            first += n
            for ref in refs:
                ours, theirs = self._caches.tensors[ref.tensor_idx].tensor, self._host[ref.tensor_idx]
                if to_host:
                    theirs[chunks, : ref.page_size_bytes] = ours[blocks, : ref.page_size_bytes]
                else:
                    ours[blocks, : ref.page_size_bytes] = theirs[chunks, : ref.page_size_bytes]
                n_bytes += n * ref.page_size_bytes
        self._done.append(TransferResult(job_id, success=True, transfer_size=n_bytes, transfer_time=0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()


class TiersOnCPU(TieringOffloadingSpec):
    """``spec_name`` of ``kv_connector_extra_config``."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1, "chunks of several blocks are not copied here"
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyingWorker(kv_caches, region)
