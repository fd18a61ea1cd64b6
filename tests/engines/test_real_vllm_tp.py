"""Real vLLM servers of unequal tensor parallelism hand KV over through p2pkv: ``make test-vllm``."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from vllm_server import VLLMServer, lasting_port, p2pkv

from cluster import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LENGTHS = (7, 32, 33, 65, 257, 1025)
NOTICED_S = 40.0


def prompt(n_tokens: int) -> list[int]:
    random = Random(n_tokens)
    return [random.randrange(300, 4000) for _ in range(n_tokens)]


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=["1 to 2", "2 to 1"])
def test_decode_has_the_heads_of_prefills_ranks(tmp_path: Path, sizes: tuple[int, int]) -> None:
    settings = {"join": [f"127.0.0.1:{lasting_port()}"], "load_deadline": 15.0, "transfer_lease": 25.0}
    servers = []
    try:
        for name, role, size in (
            ("prefill", "kv_producer", sizes[0]),
            ("decode", "kv_consumer", sizes[1]),
        ):
            transfer = p2pkv({"node_id": name, **settings}, role=role, policy="fail")
            options = ["--tensor-parallel-size", str(size)]
            servers.append(VLLMServer(tmp_path / f"{name}.log", transfer, options=options))
        prefill, decode = servers
        prefill.wait_until_ready()
        decode.wait_until_ready()
        alone = [prefill.ids(prompt(n)) for n in LENGTHS]
        assert len({tuple(ids) for ids in alone}) == len(alone), "equal outputs would hide wrong KV"
        before = decode.prompt_tokens("local_compute")
        for n, ids in zip(LENGTHS, alone, strict=True):
            assert decode.ids(prompt(n), params=prefill.prefill(prompt(n))) == ids
        n_loads = len(LENGTHS) * sizes[1]
        eventually(lambda: decode.counted("handoffs_loaded") == n_loads, NOTICED_S)
        assert decode.counted("handoffs_failed") == 0
        assert decode.prompt_tokens("external_kv_transfer") == sum(LENGTHS)
        assert decode.prompt_tokens("local_compute") == before
        eventually(lambda: prefill.count("vllm:kv_cache_usage_perc") == 0, NOTICED_S)
    finally:
        for server in servers:
            server.kill()
