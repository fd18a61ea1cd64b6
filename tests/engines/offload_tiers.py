"""Two of vLLM's tiering managers with p2pkv below them, and an oracle that knows every byte. Run by vLLM's interpreter.

Everything but the model is vLLM's: its factory loads the tier by ``module_path``, its host memory is the region that
workers share. Requests of some documents look their chunks up, load what is there and store the rest, with now and then
other weights. Prints what was seen as a line of JSON; the seed is the argument.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

CHUNK, N_CHUNKS = 8192, 24
N_DOCUMENTS, N_REQUESTS = 12, 400
NOTHING = ScheduleEndContext((), ())
WAITS = {LookupResult.RETRY, LookupResult.HIT_PENDING}


class Server:
    """One instance's scheduler, as far as its offloading goes."""

    def __init__(self, name: str, join: list[str], seen: Counter[str]) -> None:
        self.seen, self.weights, self.n_requests = seen, "the first", 0
        tier = {"type": "P2PKVTier", "module_path": "p2pkv.integrations.vllm_tier", "namespace": "a test"}
        tier |= {"join": join, "pool_size": "1MiB", "node_id": name, "deadline": 5.0}
        spec = TieringOffloadingSpec(
            OffloadingConfig(
                groups=(OffloadingGroupConfig(16, ("layers.0",), 0),),
                worker_kv_bytes_per_block=CHUNK,
                enable_kv_cache_events=False,
                extra_config={"cpu_bytes_to_use": N_CHUNKS * CHUNK, "secondary_tiers": [tier]},
                engine_id=f"{name}-{os.getpid()}",
                model=OffloadingModelConfig("a-model", "float16"),
                cache=OffloadingCacheConfig(16, 1),
                parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
                kv_cache_layout="NHD",
            )
        )
        self.manager: Any = spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.path = spec._scheduler_mmap.mmap_path

    def memory(self, chunk: int) -> Any:
        return np.asarray(self.manager.primary_tier.get_kv_memoryview())[chunk]

    def content(self, key: bytes) -> Any:
        digest = hashlib.blake2b(key + self.weights.encode(), digest_size=64).digest()
        return np.resize(np.frombuffer(digest, np.int8), CHUNK)

    def serve(self, keys: list[Any]) -> None:
        """Do what vLLM's scheduler does with a request whose chunks have these names."""
        self.n_requests += 1
        request = ReqContext(f"r{self.n_requests}")
        self.manager.on_new_request(request)
        n_there = self.n_there(keys, request)
        there, rest = keys[:n_there], keys[n_there:]
        if there:
            where = self.manager.prepare_load(there, request).chunk_ids.tolist()
            for key, chunk in zip(there, where, strict=True):
                assert (self.memory(chunk) == self.content(key)).all(), f"{key!r} has other bytes"
                self.seen[str(self.manager.get_load_source(key, request).value)] += 1
            self.manager.complete_load(there, request)
        new = self.manager.prepare_store(rest, request) if rest else None
        if new is not None and new.keys_to_store:
            for key, chunk in zip(new.keys_to_store, new.store_spec.chunk_ids.tolist(), strict=True):
                self.memory(chunk)[:] = self.content(key)
            self.manager.complete_store(new.keys_to_store, request)
        self.seen["computed"] += len(rest)
        self.manager.on_request_finished(request)
        self.manager.on_schedule_end(NOTHING)

    def n_there(self, keys: list[Any], request: Any) -> int:
        """Ask step by step, as vLLM does, until all answers are final."""
        until = time.monotonic() + 30.0
        while True:
            n, is_waiting = 0, False
            for key in keys:
                answer = self.manager.lookup(key, request)
                if answer is LookupResult.MISS:
                    break
                n, is_waiting = n + 1, is_waiting or answer in WAITS
            if not is_waiting:
                return n
            assert time.monotonic() < until, "a look-up has no answer for 30 s"
            self.manager.on_schedule_end(NOTHING)
            self.seen["steps of waiting"] += 1
            time.sleep(0.0005)

    def replace_weights(self, version: str) -> None:
        self.manager.reset_cache()
        self.tier._weights.told(version)
        self.weights = version
        self.seen["updates of weights"] += 1

    def end(self) -> None:
        self.manager.shutdown()  # raises while anybody has the memory
        assert not os.path.exists(self.path)


def main(seed: int) -> None:
    chance, seen = random.Random(seed), Counter[str]()
    documents = [
        [make_offload_key(hashlib.sha256(b"%d %d" % (number, i)).digest(), 0) for i in range(8)]
        for number in range(N_DOCUMENTS)
    ]
    first = Server("first", [], seen)
    servers = [first, Server("second", [first.tier.node.address], seen)]
    until = time.monotonic() + 30.0
    while any(len(server.tier.node.members()) < 2 for server in servers):
        assert time.monotonic() < until, "the nodes have not met within 30 s"
        time.sleep(0.01)
    for _ in range(N_REQUESTS):
        server = chance.choice(servers)
        if chance.random() < 0.02:
            server.replace_weights(chance.choice(["v1", "v2"]))
        server.serve(chance.choice(documents)[: chance.randint(1, 8)])
    for server in servers:
        server.manager.reset_cache()
        stats = server.manager.get_stats()
        assert stats is not None
        server.end()
    print(json.dumps(dict(seen) | {"source": CacheHitSource.P2P.value}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
