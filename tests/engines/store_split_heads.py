"""Store pages of SGLang's own host pools by shares of their heads, and fetch them with servers of other sizes.

Run by SGLang's interpreter. Prints one line of JSON a pair of tensor parallel sizes.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from store_side_pools import HASHES, LAYERS, PAGES, TOKENS, bare, meet, tokens

from p2pkv.integrations.sglang_hicache import P2PKVHiCache
from p2pkv.testing.ports import free_port

HEADS, WIDTH, LCM = 8, 16, 4


def host_pool(n_heads: int) -> Any:
    """Return a pool of one rank, in the layout that can be split."""
    return bare(
        MHATokenToKVPoolHost,
        layout="page_head",
        layer_num=LAYERS,
        size=PAGES * TOKENS,
        page_num=PAGES,
        head_num=n_heads,
        head_dim=WIDTH,
        dtype=torch.float16,
        kv_buffer=torch.zeros((2, PAGES, n_heads, TOKENS, LAYERS, WIDTH), dtype=torch.float16),
    )


class Server:
    """The ranks of one server, as SGLang tells them of ``tp_lcm_size``."""

    def __init__(self, tp_size: int, join: str) -> None:
        self.pools = [host_pool(HEADS // tp_size) for _ in range(tp_size)]
        self.ranks = [
            P2PKVHiCache(
                SimpleNamespace(
                    tp_rank=rank,
                    tp_size=tp_size,
                    tp_lcm_size=LCM,
                    should_split_heads=tp_size < LCM,
                    model_name="m",
                    extra_config={"pool_size": "16MiB", "join": [join], "interface_v1": 1},
                )
            )
            for rank in range(tp_size)
        ]
        for rank, pool in zip(self.ranks, self.pools, strict=True):
            rank.register_mem_pool_host(pool)

    def page(self, number: int) -> torch.Tensor:
        """Return all heads of a page."""
        return torch.cat([pool.kv_buffer[:, number] for pool in self.pools], dim=1)


def stored(sizes: tuple[int, int], join: str) -> dict[str, Any]:
    writer, reader = (Server(size, join) for size in sizes)
    try:
        meet(*writer.ranks, *reader.ranks)
        for pool in writer.pools:
            memory = pool.kv_buffer.view(torch.uint8)
            memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
        sides = [list(zip(server.ranks, server.pools, strict=True)) for server in (writer, reader)]
        set_ = [rank.batch_set_v1(HASHES, tokens(0, 1, 2)) for rank, _ in sides[0]]
        got = [rank.batch_get_v1(HASHES, tokens(5, 3, 4)) for rank, _ in sides[1]]
        pairs = [(writer.page(i), reader.page(j)) for i, j in enumerate((5, 3, 4))]
        equal = [torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs]
        return {
            "sizes": sizes,
            "set": all(map(all, set_)),
            "got": all(map(all, got)),
            "equal": equal,
        }
    finally:
        for backend in (*writer.ranks, *reader.ranks):
            backend.close()


if __name__ == "__main__":
    for sizes in ((1, 2), (2, 1), (1, 4), (4, 2)):
        print(json.dumps(stored(sizes, f"127.0.0.1:{free_port()}")), flush=True)
