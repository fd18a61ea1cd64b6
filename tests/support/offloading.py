"""vLLM's side of a tier: its host memory, what it says of itself, and the jobs that it gives."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pkv.integrations.vllm_connector.weights import Weights
from p2pkv.integrations.vllm_tier import P2PKVTier

CHUNK = 4096


def told(**changes: Any) -> SimpleNamespace:
    """Return vLLM's ``OffloadingConfig`` of a plain model on one rank."""
    groups = (SimpleNamespace(tokens_per_block=16, layer_names=("layers.0", "layers.1"), group_id=0),)
    parallel = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    known = {
        "groups": groups,
        "model": SimpleNamespace(name="a-model", dtype="float16"),
        "cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": SimpleNamespace(**parallel, data_parallel_index=0, is_parallelism_agnostic=False),
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": "NHD",
    }
    return SimpleNamespace(**known | changes)


def spec(offered: Any = None, *, tells_events: bool = False) -> SimpleNamespace:
    """Return vLLM's ``OffloadingSpec``."""
    events = SimpleNamespace(enable_kv_cache_events=tells_events)
    return SimpleNamespace(config=told() if offered is None else offered, kv_events_config=events)


def content(seed: bytes) -> NDArray[np.int8]:
    """Return a chunk's bytes."""
    digest = hashlib.blake2b(seed, digest_size=64).digest()
    return np.resize(np.frombuffer(digest, np.int8), CHUNK)


@dataclass
class Memory:
    """vLLM's host memory of some chunks."""

    n_chunks: int
    array: NDArray[np.int8] = field(init=False)

    def __post_init__(self) -> None:
        self.array = np.zeros((self.n_chunks, CHUNK), np.int8)

    def write(self, chunk: int, seed: bytes) -> None:
        self.array[chunk] = content(seed)

    def holds(self, chunk: int, seed: bytes) -> bool:
        return bool((self.array[chunk] == content(seed)).all())


def tier(memory: Memory, offered: Any = None, **settings: Any) -> P2PKVTier:
    """Return a tier over ``memory``, with settings as of ``secondary_tiers``."""
    known: dict[str, Any] = {
        "namespace": "a test",
        "pool_size": 1 << 20,
        "deadline": 5.0,
        "weights": Weights(),
    }
    return P2PKVTier(
        offloading_spec=spec(offered),
        primary_kv_view=memory.array.data,
        tier_type="P2PKVTier",
        backpressure_detector=None,
        **known | settings,
    )


def job(number: int, keys: list[bytes], chunks: list[int]) -> Any:
    """Return a job as vLLM gives it."""
    return SimpleNamespace(
        job_id=number, keys=keys, chunk_ids=np.array(chunks, np.int32), req_context=request("r")
    )


def request(request_id: str) -> Any:
    """Return vLLM's ``ReqContext``."""
    return SimpleNamespace(req_id=request_id)
