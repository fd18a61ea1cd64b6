"""What vLLM shows its connector, without vLLM: its configuration, caches, blocks and requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
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
            use_mla=False,
            get_total_num_kv_heads=lambda: SHAPE[0],
            hf_config=ModelConfigFake(rope_parameters={"rope_theta": 10000.0}, _name_or_path="/models/tiny"),
        ),
    )


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's own, as those that follow."""


class SlidingWindowSpec(SimpleNamespace):
    """Layers that look back at a window."""


class ChunkedLocalAttentionSpec(SimpleNamespace):
    """Layers that look back at their chunk."""


class MambaSpec(SimpleNamespace):
    """Layers with a state."""


STATE_BLOCK = 1024
"""Tokens of a state's block: one for any prompt."""

_ATTENTION = {"block_size": BLOCK, "dtype": "float32", "head_size": 32}
SPECS: dict[str, SimpleNamespace] = {
    "full": FullAttentionSpec(**_ATTENTION),
    "window": SlidingWindowSpec(**_ATTENTION, sliding_window=6),
    "wide": SlidingWindowSpec(**_ATTENTION, sliding_window=11),
    "chunk": ChunkedLocalAttentionSpec(**_ATTENTION, attention_chunk_size=2 * BLOCK),
    "state": MambaSpec(block_size=STATE_BLOCK),
}
"""Kinds of layers."""


def kv_cache_config(
    n_groups: int = 1, n_blocks: int = 8, kinds: Sequence[str] = ("full",), n_layers: int = LAYERS
) -> SimpleNamespace:
    """Return a model of groups of layers, each of one of the ``kinds``, or of several of the first."""
    kinds = kinds if len(kinds) > 1 else kinds * n_groups
    groups = [
        SimpleNamespace(kv_cache_spec=SPECS[kind], layer_names=layer_names(number, len(kinds), n_layers))
        for number, kind in enumerate(kinds)
    ]
    return SimpleNamespace(kv_cache_groups=groups, hash_block_size=BLOCK, num_blocks=n_blocks)


def layer_names(group: int, n_groups: int, n_layers: int) -> list[str] | None:
    """Return what a group's layers are called; None if they are all there are."""
    return None if n_groups == 1 else [f"{group}.layers.{i}" for i in range(n_layers)]


def looked_at(spec: SimpleNamespace, n_tokens: int) -> range:
    """Return the numbers of a layer's blocks that the token after the first ``n_tokens`` is computed from."""
    if isinstance(spec, MambaSpec):
        first = n_tokens - 1  # the state after the last one
    elif isinstance(spec, SlidingWindowSpec):
        first = n_tokens - (spec.sliding_window - 1)  # the token itself is one of the window
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        first = n_tokens - n_tokens % spec.attention_chunk_size
    else:
        first = 0
    blocks = sorted({token // spec.block_size for token in range(max(0, first), n_tokens)})
    return range(blocks[0], blocks[-1] + 1) if blocks else range(0)


class BlockFake:
    """A block of the pool, and who uses it."""

    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 0


class BlockPoolFake:
    """Blocks that are used by one or several, and those that are free. Block 0 is none."""

    def __init__(self, n_blocks: int) -> None:
        self.blocks = [BlockFake(block_id) for block_id in range(n_blocks)]
        self.free = list(range(1, n_blocks))

    def take(self) -> int:
        block_id = self.free.pop(0)
        self.blocks[block_id].ref_cnt = 1
        return block_id

    def touch(self, blocks: Sequence[BlockFake]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "only what is in use may be held"
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[BlockFake]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                # the next one to need a block has this one
                self.free.insert(0, block.block_id)

    def give_back(self, block_ids: Iterable[int]) -> None:
        self.free_blocks([self.blocks[block_id] for block_id in block_ids if block_id])


class RequestFake:
    """A request, its tokens hashed block by block."""

    def __init__(self, request_id: str, tokens: list[int], params: dict[str, Any] | None) -> None:
        self.request_id, self.prompt_token_ids, self.kv_transfer_params = request_id, list(tokens), params
        self._all_token_ids = list(tokens)
        self.num_prompt_tokens = len(tokens)
        self.max_tokens = 16
        self.n_output = 0
        self.num_computed_tokens = 0
        self.block_hashes = [prefix_hash(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        self.kv_hints: object = None
        self.lora_request, self.mm_features, self.status = None, [], SimpleNamespace(name="WAITING")
        self.tables: list[list[int]] = []
        self.state = "waiting"  # waiting, loading, running, finished
        self.n_local = 0
        self.runs_on = False  # it has a step of computing, and does not finish by it
        self.loaded_tokens = 0
        self.answer: dict[str, Any] | None = None

    @property
    def all_token_ids(self) -> list[int]:
        return self._all_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids) + self.n_output

    @property
    def block_ids(self) -> list[int]:
        """The blocks of the first group."""
        return self.tables[0] if self.tables else []


def prefix_hash(tokens: list[int]) -> bytes:
    return hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).digest()


def expected(tokens: list[int], shape: tuple[int, ...], weights: int = 0, group: int = 0) -> np.ndarray:
    """Return what the model would compute for a block that ends with ``tokens``, over all layers of a group."""
    seed = [weights, group, *np.frombuffer(prefix_hash(tokens), np.uint8).tolist()]
    return np.random.default_rng(seed).standard_normal(shape, np.float32)
