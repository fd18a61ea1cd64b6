"""Store a page of each of SGLang's own side pools, and fetch it with another backend. Run by SGLang's interpreter.

The pools are SGLang's classes without the device pools that they mirror, which CPUs don't have: their attributes are
set as their constructors do. Prints one line of JSON a pool.
"""

from __future__ import annotations

import ctypes
import json
import time
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4StateHostPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost

from p2pkv.integrations.sglang_hicache import P2PKVHiCache
from p2pkv.testing.ports import free_port

LAYERS, PAGES, TOKENS = 4, 8, 64
HASHES = [f"{i:064x}" for i in range(3)]


def bare(kind: type, **attributes: Any) -> Any:
    pool = object.__new__(kind)
    for name, value in ({"page_size": TOKENS, "_destroyed": True} | attributes).items():
        setattr(pool, name, value)
    return pool


def indexer(layout: str) -> Any:
    """The index of DeepSeek-V3.2's and GLM-5's sparse attention."""
    stride = TOKENS * 132
    return bare(
        DSAIndexerPoolHost,
        layout=layout,
        layer_num=LAYERS,
        indexer_page_stride_size=stride,
        indexer_dtype=torch.uint8,
        index_k_with_scale_buffer=torch.zeros((PAGES, LAYERS, 1, stride), dtype=torch.uint8),
    )


def state(layout: str) -> Any:
    """The compressed state of DeepSeek-V4."""
    return bare(
        DeepSeekV4StateHostPool,
        layout=layout,
        swa_page_size=TOKENS,
        layer_num=LAYERS,
        state_page_bytes=256,
        dtype=torch.uint8,
        pool_name="state",
        kv_buffer=torch.zeros((PAGES, LAYERS, 1, 256), dtype=torch.uint8),
    )


def keys_only(layout: str) -> Any:
    """The index of MiniMax-M3."""
    dims = {"page_first": (PAGES * TOKENS, LAYERS), "page_first_direct": (PAGES, LAYERS, TOKENS)}[layout]
    return bare(
        MHATokenToKOnlyPoolHost,
        layout=layout,
        layer_num=LAYERS,
        head_num=1,
        head_dim=128,
        dtype=torch.float16,
        k_buffer=torch.zeros((*dims, 1, 128), dtype=torch.float16),
    )


POOLS = {"indexer": indexer, "deepseek_v4_c4_state": state, "index_k": keys_only}


def bytes_of(pool: Any, page: int) -> bytes:
    addresses, lengths = pool.get_page_buffer_meta(tokens(page))
    return b"".join(ctypes.string_at(a, n) for a, n in zip(addresses, lengths, strict=True))


def tokens(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(TOKENS) + page * TOKENS for page in pages])


def backend(join: str) -> P2PKVHiCache:
    extra = {"pool_size": "16MiB", "join": [join]}
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    return P2PKVHiCache(SimpleNamespace(**ranks, is_mla_model=True, model_name="m", extra_config=extra))


def meet(*backends: P2PKVHiCache) -> None:
    """Wait until all know each other: what is published before that is told to nobody else in time."""
    until = time.monotonic() + 60.0
    while any(len(each.node.members()) < len(backends) for each in backends):
        assert time.monotonic() < until, "the nodes have not met within 60 s"
        time.sleep(0.01)


def stored(name: str, layout: str, join: str) -> dict[str, Any]:
    ours, theirs = POOLS[name](layout), POOLS[name](layout)
    memory = ours.get_hybrid_pool_buffer()[0].view(torch.uint8)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
    writer, reader = backend(join), backend(join)
    try:
        meet(writer, reader)
        for side, pool in ((writer, ours), (reader, theirs)):
            # such models' KV is stored too; here the indexer alone stands for them
            side.register_mem_pool_host(SimpleNamespace(kv_buffer=None, page_size=TOKENS))
            side.register_mem_host_pool_v2(pool, name)
            side.on_host_pools_registered()
        asked = PoolTransfer(name=name, keys=HASHES, hit_policy=PoolHitPolicy.ALL_PAGES)
        asked.host_indices = tokens(0, 1, 2)
        set_ = writer.batch_set_v2([asked])[name]
        hits = reader.batch_exists_v2(HASHES, [asked]).kv_hit_pages
        asked.host_indices = tokens(5, 3, 4)
        got = reader.batch_get_v2([asked])[name]
        equal = [bytes_of(ours, i) == bytes_of(theirs, j) for i, j in enumerate((5, 3, 4))]
        return {"pool": name, "layout": layout, "set": set_, "hits": hits, "got": got, "equal": equal}
    finally:
        writer.close()
        reader.close()


if __name__ == "__main__":
    join = f"127.0.0.1:{free_port()}"
    for name in POOLS:
        for layout in ("page_first", "page_first_direct"):
            print(json.dumps(stored(name, layout, join)), flush=True)
