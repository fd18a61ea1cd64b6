"""Conversations of many turns on two vLLM servers, with different ways to keep their KV in turn: run by hand.

``python tests/engines/vllm_turns.py none offloading fs tier p2pkv`` starts two servers with each (``turns.py``). It
prints where the prompts' tokens came from by vLLM's own count and how long the first token took, and ends with an error
unless all answers are the same. ``P2PKV_TURNS`` is 10 unless it is set. ``none`` is vLLM's prefix cache alone,
``offloading`` its own offloading to each server's host memory, ``fs`` that with vLLM's tier in a folder that both
have, ``tier`` that with p2pkv's tier instead, and ``p2pkv`` the connector. A CPU's offloading copies with the worker of
``tools/engines/vllm_cpu/tiers_on_cpu.py``.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / "support"), str(_TESTS / "engines"), str(_TESTS.parent)]

from turns import N_TOKENS, Pair, Seen, Start, compare  # noqa: E402
from vllm_server import VLLMServer, lasting_port, p2pkv  # noqa: E402

from demo.xpyd.real_engines import ROOT  # noqa: E402

N_BLOCKS = 136
"""Of 32 tokens, in a device's memory: about what SGLang's servers have in ``sglang_turns.py``."""
HOST_NBYTES = 32 << 20
"""Twice that, as there."""
POOL = "128MiB"
OPTIONS = ["--enable-prefix-caching", "--num-gpu-blocks-override", str(N_BLOCKS)]
ON_CPU = {"PYTHONPATH": str(ROOT / "tools" / "engines" / "vllm_cpu")}


def offloading(*tiers: Mapping[str, object]) -> dict[str, object]:
    """Return the ``--kv-transfer-config`` of vLLM's own offloading, with secondary tiers."""
    extra = {"spec_name": "TiersOnCPU", "spec_module_path": "tiers_on_cpu", "cpu_bytes_to_use": HOST_NBYTES}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, "secondary_tiers": list(tiers)},
    }


def without(folder: Path, undo: ExitStack) -> Pair:
    return ready(folder, undo, [None, None])


def with_offloading(folder: Path, undo: ExitStack) -> Pair:
    return ready(folder, undo, [offloading(), offloading()])


def with_folder(folder: Path, undo: ExitStack) -> Pair:
    tier = {"type": "fs", "root_dir": str(folder / "chunks")}
    return ready(folder, undo, [offloading(tier), offloading(tier)])


def with_tier(folder: Path, undo: ExitStack) -> Pair:
    common = {"type": "P2PKVTier", "module_path": "p2pkv.integrations.vllm_tier", "namespace": "tiny"}
    common |= {"join": [f"127.0.0.1:{lasting_port()}"], "pool_size": POOL}
    return ready(folder, undo, [offloading({**common, "node_id": name}) for name in ("first", "second")])


def with_p2pkv(folder: Path, undo: ExitStack) -> Pair:
    common: dict[str, object] = {"join": [f"127.0.0.1:{lasting_port()}"], "pool_size": POOL}
    return ready(
        folder, undo, [p2pkv({**common, "node_id": name}, policy="recompute") for name in ("first", "second")]
    )


STORAGES: dict[str, Start] = {
    "none": without,
    "offloading": with_offloading,
    "fs": with_folder,
    "tier": with_tier,
    "p2pkv": with_p2pkv,
}


def ready(folder: Path, undo: ExitStack, transfers: list[dict[str, object] | None]) -> Pair:
    """Start two servers, which end with ``undo``; return them when they answer."""
    servers = []
    for number, transfer in enumerate(transfers):
        log = folder / f"{number}.log"
        servers.append(VLLMServer(log, transfer, environment=ON_CPU, options=OPTIONS))
        undo.callback(servers[-1].kill)
    for server in servers:
        server.wait_until_ready()
    first, second = servers
    return Pair((partial(ask, first), partial(ask, second)), partial(count, servers))


def ask(server: VLLMServer, prompt: list[int], seen: Seen) -> None:
    """Have ``server`` answer, and note when its first token came."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    began = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"HTTP {response.status}: {response.read(500)!r}; see {server.log}")
    ids: list[int] = []
    for line in response:
        if line.startswith(b"data: {"):
            if not ids:
                seen.first_s.append(time.monotonic() - began)
            ids += json.loads(line.removeprefix(b"data: "))["choices"][0]["token_ids"]
    connection.close()
    assert len(ids) == N_TOKENS, ids
    seen.answers.append(ids)


def count(servers: list[VLLMServer], seen: Seen) -> None:
    """Note where the prompts' tokens came from."""
    for server in servers:
        seen.tokens["device"] += server.prompt_tokens("local_cache_hit")
        seen.tokens["outside"] += server.prompt_tokens("external_kv_transfer")


if __name__ == "__main__":
    compare(STORAGES, sys.argv[1:] or list(STORAGES), ("device", "outside"))
