"""What vLLM shows its connector, without vLLM: its configuration, caches, blocks and requests."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

BLOCK, LAYERS = 4, 3
SHAPE = (2, BLOCK, 16)
"""Heads, tokens, width: a row of 512 bytes."""


class CacheFake:
    """One layer's cache: the part of a torch tensor that the connector looks at."""

    def __init__(
        self, storage: np.ndarray, array: np.ndarray, device: str = "cpu", address: int | None = None
    ) -> None:
        """``address``: where the storage really is, if it is in the memory of a device."""
        self._storage, self.array, self.device = storage, array, SimpleNamespace(type=device)
        self._address = int(storage.ctypes.data) if address is None else address
        self.shape, self.dtype = array.shape, array.dtype

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data) - int(self._storage.ctypes.data) + self._address

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, block: int) -> CacheFake:
        return CacheFake(self._storage, self.array[block])

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def stride(self, dimension: int | None = None) -> Any:
        strides = tuple(n // self.array.itemsize for n in self.array.strides)
        return strides if dimension is None else strides[dimension]

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self._address, nbytes=lambda: self._storage.nbytes)


def caches(storage: np.ndarray, device: str = "cpu", address: int | None = None) -> dict[str, CacheFake]:
    """Return the caches of all layers in one storage, as vLLM's CPU backend lays them out."""
    return {f"layers.{i}": CacheFake(storage, storage[i], device, address) for i in range(len(storage))}


class DeviceMemory(Protocol):
    """What ``device_buffers.py`` makes; the engine's kernels run on ``stream``."""

    address: int
    stream: int

    def write(self, data: np.ndarray) -> None: ...

    def read(self) -> np.ndarray: ...


class ModelConfigFake:
    """What transformers reads from a model's ``config.json``."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def to_dict(self) -> dict[str, Any]:
        return self._fields


def vllm_config(settings: dict[str, Any], role: str, policy: str, **cache: Any) -> SimpleNamespace:
    """Return the parts of vLLM's configuration that the connector reads."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=settings,
            is_kv_producer=role in ("kv_producer", "kv_both"),
            is_kv_consumer=role in ("kv_consumer", "kv_both"),
            kv_load_failure_policy=policy,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            world_size=1,
            rank=0,
            data_parallel_index=0,
        ),
        cache_config=SimpleNamespace(**{"cache_dtype": "auto", "prefix_caching_hash_algo": "sha256"} | cache),
        model_config=SimpleNamespace(
            served_model_name="tiny",
            model="/models/tiny",
            revision=None,
            dtype="float32",
            quantization=None,
            hf_config=ModelConfigFake(rope_parameters={"rope_theta": 10000.0}, _name_or_path="/models/tiny"),
        ),
    )


def kv_cache_config(n_groups: int = 1, n_blocks: int = 8) -> SimpleNamespace:
    """Return a model's one kind of attention, or several."""
    spec = SimpleNamespace(block_size=BLOCK, dtype="float32", head_size=32)
    groups = [SimpleNamespace(kv_cache_spec=spec)] * n_groups
    return SimpleNamespace(kv_cache_groups=groups, hash_block_size=BLOCK, num_blocks=n_blocks)


class RequestFake:
    """A request, its tokens hashed block by block."""

    def __init__(self, request_id: str, tokens: list[int], params: dict[str, Any] | None) -> None:
        self.request_id, self.prompt_token_ids, self.kv_transfer_params = request_id, tokens, params
        self.num_prompt_tokens = self.num_tokens = len(tokens)
        self.num_computed_tokens = 0
        self.block_hashes = [prefix_hash(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        self.lora_request, self.mm_features, self.status = None, [], SimpleNamespace(name="WAITING")
        self.block_ids: list[int] = []
        self.state = "waiting"  # waiting, loading, running, finished
        self.n_local = 0
        self.runs_on = False  # it has a step of computing, and does not finish by it
        self.loaded_tokens = 0
        self.answer: dict[str, Any] | None = None


def prefix_hash(tokens: list[int]) -> bytes:
    return hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).digest()


def expected(tokens: list[int], block: int, shape: tuple[int, ...], weights: int = 0) -> np.ndarray:
    """Return what the model would compute for a block of a prompt, over all layers, with its ``weights``."""
    seed = [weights, *np.frombuffer(prefix_hash(tokens[: (block + 1) * BLOCK]), np.uint8).tolist()]
    return np.random.default_rng(seed).standard_normal(shape, np.float32)
