"""Real vLLM servers hand prompts over for as long as one wants, to a decode that is late, hangs up or never comes.

``make test-vllm ARGS=...`` runs a minute of it, ``P2PKV_SOAK_S=600`` ten. Prefill has a buddy pool.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm_server import VLLMServer, lasting_port, p2pkv

from cluster import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

SOAK_S = float(os.environ.get("P2PKV_SOAK_S", "60"))
NOTICED_S = 60.0
LEASE_S = 30.0
LENGTHS = (7, 33, 64, 257, 1025)
N_PROMPTS = 10
FATES = {"at once": 6, "late": 4, "hangs up": 2, "never": 1}
"""What decode does with a hand-off."""


def prompt(seed: int) -> list[int]:
    """Return one of a few prompts, some of which begin alike."""
    shared, own = Random(seed % 3), Random(seed)
    n = LENGTHS[seed % len(LENGTHS)]
    return [(shared if i < n // 2 else own).randrange(300, 4000) for i in range(n)]


def hang_up(server: VLLMServer, tokens: list[int], params: Mapping[str, Any], after: float) -> None:
    """Ask for an answer, and leave before it is there."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 200, "kv_transfer_params": params}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    time.sleep(after)  # a client's patience; nothing waits for it
    connection.close()


def test_outputs_are_right_and_no_block_is_lost(tmp_path: Path) -> None:
    settings = {"join": [f"127.0.0.1:{lasting_port()}"], "load_deadline": 30.0, "transfer_lease": LEASE_S}
    stows = {"buddy_pool_size": "64MiB", "stow_after": 0.2}
    prefill = VLLMServer(
        tmp_path / "prefill.log", p2pkv({"node_id": "prefill", **settings, **stows}, role="kv_producer")
    )
    decode = VLLMServer(
        tmp_path / "decode.log", p2pkv({"node_id": "decode", **settings}, role="kv_consumer", policy="fail")
    )
    try:
        prefill.wait_until_ready()
        decode.wait_until_ready()
        alone = [prefill.ids(prompt(seed)) for seed in range(N_PROMPTS)]
        assert len({tuple(ids) for ids in alone}) == len(alone), "equal outputs would hide wrong KV"
        chance, fates, until = Random(1), Counter[str](), time.monotonic() + SOAK_S
        n_external = decode.prompt_tokens("external_kv_transfer")
        while time.monotonic() < until or fates["late"] == 0:
            seed = chance.randrange(N_PROMPTS)
            (fate,) = chance.choices(list(FATES), list(FATES.values()))
            tokens, params = prompt(seed), prefill.prefill(prompt(seed))
            fates[fate] += 1
            if fate == "late":  # prefill has all its blocks back, while nobody has asked for them
                eventually(lambda: prefill.count("vllm:kv_cache_usage_perc") == 0, NOTICED_S)
            if fate in ("at once", "late"):
                assert decode.ids(tokens, params=params) == alone[seed], (fate, seed)
                n_external += len(tokens)
            elif fate == "hangs up":
                hang_up(decode, tokens, params, chance.choice([0.0, 0.02, 0.2]))
        print(dict(fates), "stowed", prefill.counted("handoffs_stowed"))
        assert prefill.counted("handoffs_stowed") >= fates["late"]
        assert decode.prompt_tokens("external_kv_transfer") >= n_external
        for server in (prefill, decode):
            eventually(lambda s=server: s.count("vllm:kv_cache_usage_perc") == 0, NOTICED_S)  # type: ignore[misc]
            eventually(lambda s=server: s.count("vllm:num_requests_running") == 0, NOTICED_S)  # type: ignore[misc]
        print("failed", decode.counted("handoffs_failed"), "of", fates["hangs up"], "that were given up")
        assert decode.counted("handoffs_failed") <= fates["hangs up"]
    finally:
        prefill.kill()
        decode.kill()
