"""What a SGLang process offers its cache linker: device pools, this rank's place, and a word with the other ranks.

SGLang itself groups the pools of models with several of them. Of plain ones, which it knows for host pools only, the
group is made here of the same parts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

from p2pkv.errors import ConfigError
from p2pkv.integrations.engine import current_stream
from p2pkv.integrations.sglang.device_pools import DeviceEntry
from p2pkv.integrations.sglang.installed import server_settings
from p2pkv.integrations.sglang.side_pools import PoolTransfer

_CACHE = "sglang.srt.mem_cache"


class Group(Protocol):
    """The part of SGLang's ``DevicePoolGroup`` that is relied on."""

    entry_map: Mapping[Any, DeviceEntry]
    num_layers: int
    rank_replicated: bool

    def resolve_transfers(
        self, transfers: Sequence[PoolTransfer], *, allow_partial: bool = ..., allow_missing_kv: bool = ...
    ) -> list[PoolTransfer]:
        """Return what is to be moved, pool by pool; ``host_indices`` of the result are places in the device pool."""


@dataclass(frozen=True, slots=True)
class Offered:
    """All that a linker takes from SGLang; tests make their own."""

    group: Group
    halves: int
    """The kinds of tensors in a page of a plain pool: 2 with K and V, 1 with MLA; 0 of any other group."""
    storage_config: object
    """As SGLang gives a storage backend of HiCache one."""
    agree: Callable[[bool], bool]
    """Returns whether all ranks that hold a part of the same tokens say yes. Blocks until all have said something."""
    stream: Callable[[], int | None]
    """Returns the CUDA stream that this thread queues its work on; None on a CPU."""
    layer_counter: object
    """What models ask whether a layer has come; here all have, always."""


def offered_by(
    params: Any, components: Collection[Any], extra_config: Mapping[str, object] | None
) -> Offered:
    """Look at this process. Raises :class:`~p2pkv.errors.ConfigError`, or ValueError, for what can't be linked."""
    parallel = _settings("parallel")
    if parallel.pp_size > 1 or parallel.attn_dcp_size > 1:
        raise ConfigError(
            "SGLang agrees on what a linker has found over tensor and context parallel ranks only: no pipeline stages, "
            f"of which there are {parallel.pp_size}, and no decode context parallelism, of size "
            f"{parallel.attn_dcp_size}; HiCache can do both"
        )
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    halves = _halves_of_a_plain_pool(kvcache, components)
    if halves:
        group = _plain_group(kvcache, params, halves)
    else:
        assemble = importlib.import_module(f"{_CACHE}.hybrid_cache.linker_pool_assembler")
        group = assemble.resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=params.page_size, params=params, components=set(components)
        )
    kinds = {t.device.type for e in group.entry_map.values() for t in e.get_hybrid_pool_buffer()}
    if kinds - {"cpu", "cuda"}:
        raise ConfigError(
            f"KV lies on {', '.join(sorted(kinds))}; p2pkv reads memory of CPUs and CUDA devices"
        )
    linker = importlib.import_module(f"{_CACHE}.unified_cache.unified_cache_linker")
    return Offered(
        group=group,
        halves=halves,
        storage_config=_storage_config(params, parallel, group, extra_config),
        agree=_agreement(params, parallel),
        stream=current_stream if "cuda" in kinds else lambda: None,
        layer_counter=linker.LayerWiseLoadCounter(group.num_layers),
    )


def _settings(name: str) -> Any:
    settings = server_settings(name)
    if settings is None:
        raise ConfigError(f"a cache linker is SGLang's to make: this process has no server's {name} settings")
    return settings


def _halves_of_a_plain_pool(kvcache: Any, components: Collection[Any]) -> int:
    """Return 2 of a pool of K and V, 1 of one of MLA, 0 of one that is something else besides."""
    pools = importlib.import_module(f"{_CACHE}.memory_pool")
    if len(components) != 1:
        return 0
    if type(kvcache) is pools.MLATokenToKVPool:
        return 1
    if type(kvcache) is not pools.MHATokenToKVPool or kvcache.kv_cache_layout != "nhd":
        return 0
    scales = (kvcache.k_scale_buffer, getattr(kvcache, "native_k_scale_buffer", None))
    return 2 if scales == (None, None) else 0


def _plain_group(kvcache: Any, params: Any, halves: int) -> Group:
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise ConfigError(
            "the draft model's KV can't be stored beside this model's straight from the device; use HiCache"
        )
    if kvcache.host_transfer_translate is not None:
        raise ConfigError(
            "with --enable-unified-memory pages lie where their numbers don't say; leave it away"
        )
    assemble = importlib.import_module(f"{_CACHE}.hybrid_cache.linker_pool_assembler")
    kv = importlib.import_module(f"{_CACHE}.hicache_storage").PoolName.KV
    layers = len(kvcache.kv_buffer if halves == 1 else kvcache.k_buffer)
    entry = assemble.DevicePoolEntry(
        name=kv,
        indices_from_pool=kv,
        device_pool=kvcache,
        components=[kvcache.kv_buffer if halves == 1 else [*kvcache.k_buffer, *kvcache.v_buffer]],
        layer_mapping={i: i if halves == 1 else (i, layers + i) for i in range(layers)},
        page_size=params.page_size,
        rows_are_pages=False,
    )
    group: Group = assemble.DevicePoolGroup([entry], layers, params.page_size, rank_replicated=halves == 1)
    return group


def _storage_config(
    params: Any, parallel: Any, group: Group, extra_config: Mapping[str, object] | None
) -> object:
    """Return what SGLang would tell a storage backend of HiCache, of which keys are made."""
    dp = importlib.import_module("sglang.srt.layers.dp_attention")
    is_dp = dp.is_dp_attention_enabled()
    serving = _settings("serving")
    return SimpleNamespace(
        tp_rank=parallel.attn_tp_rank if is_dp else parallel.tp_rank,
        tp_size=parallel.attn_tp_size if is_dp else parallel.tp_size,
        dp_rank=parallel.attn_dp_rank if is_dp else 0,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=params.attn_cp_rank,
        attn_cp_size=params.attn_cp_size,
        dcp_rank=0,
        dcp_size=1,
        is_mla_model=group.rank_replicated,
        is_storage_writer=not group.rank_replicated or parallel.attn_tp_rank == 0,
        is_page_first_layout=False,
        model_name=serving.served_model_name,
        extra_config=extra_config,
    )


def _agreement(params: Any, parallel: Any) -> Callable[[bool], bool]:
    """Return how ranks agree: over the groups over which SGLang's tree agrees on what was found."""
    torch = importlib.import_module("torch")
    offered = (params.attn_cp_cache_group, params.attn_tp_cache_group)
    groups = [g for g in offered if g is not None and torch.distributed.get_world_size(group=g) > 1]
    if not groups and parallel.tp_size > 1:
        groups = [params.tp_cache_group]

    def agree(word: bool) -> bool:
        words = torch.tensor([int(word)], dtype=torch.int)
        for group in groups:
            torch.distributed.all_reduce(words, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(words.item())

    return agree
