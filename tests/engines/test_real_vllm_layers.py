"""Real vLLM servers: decode computes with a hand-off while its layers come: ``make test-vllm``."""

from __future__ import annotations

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from vllm_server import BLOCK, VLLMServer, lasting_port, p2pkv

from cluster import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LENGTHS = (7, 32, 33, 65, 257, 1025)
LAYER_DEADLINE_S = 5.0
NOTICED_S = 40.0


def prompt(n_tokens: int, seed: int = 0) -> list[int]:
    random = Random(f"{n_tokens}/{seed}")
    return [random.randrange(300, 4000) for _ in range(n_tokens)]


def test_decode_computes_with_what_it_loads_by_layer(tmp_path: Path) -> None:
    settings: dict[str, object] = {"join": [f"127.0.0.1:{lasting_port()}"], "share_prefixes": False}
    settings["transfer_lease"] = 25.0
    of_decode = {"node_id": "decode", "layer_deadline": LAYER_DEADLINE_S}
    transfers = (
        p2pkv(settings | {"node_id": "prefill"}, role="kv_producer"),
        p2pkv(settings | of_decode, role="kv_consumer", policy="recompute"),
    )
    servers = [VLLMServer(tmp_path / f"{i}.log", transfer) for i, transfer in enumerate(transfers)]
    prefill, decode = servers
    try:
        for server in servers:
            server.wait_until_ready()
        alone = [prefill.ids(prompt(n)) for n in LENGTHS]
        assert len({tuple(ids) for ids in alone}) == len(alone), "equal outputs would hide wrong KV"
        decode.ids(prompt(40, 1), params=prefill.prefill(prompt(40, 1)))  # the first one, in the background
        before = decode.prompt_tokens("external_kv_transfer")
        for n, ids in zip(LENGTHS, alone, strict=True):
            assert decode.ids(prompt(n), params=prefill.prefill(prompt(n))) == ids
        whole = sum((n - 1) // BLOCK * BLOCK for n in LENGTHS)
        eventually(lambda: decode.prompt_tokens("external_kv_transfer") - before == whole, NOTICED_S)
        assert decode.counted("handoffs_loaded_by_layer") == sum(n > BLOCK for n in LENGTHS)
        assert decode.counted("handoffs_failed") == 0

        # one that never comes costs the others of its step the deadline, and is computed
        given = prefill.prefill(prompt(257))
        gone = copy.deepcopy(given)
        gone["p2pkv"]["name"] = "made up"
        with ThreadPoolExecutor(2) as pool:
            began = time.monotonic()
            other = pool.submit(decode.ids, prompt(65, 2), 40)
            assert decode.ids(prompt(257), params=gone) == alone[LENGTHS.index(257)]
            assert other.result() == prefill.ids(prompt(65, 2), 40)
        assert time.monotonic() - began < LAYER_DEADLINE_S + NOTICED_S
        eventually(lambda: decode.counted("handoffs_failed") == 1, NOTICED_S)
        assert decode.ids(prompt(257), params=given) == alone[LENGTHS.index(257)]
        assert decode.counted("handoffs_failed") == 1
        for server in servers:
            eventually(lambda server=server: server.count("vllm:kv_cache_usage_perc") == 0, NOTICED_S)
    finally:
        for server in servers:
            server.kill()
