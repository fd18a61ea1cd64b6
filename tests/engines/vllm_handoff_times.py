"""How long a hand-off takes with p2pkv, with NixlConnector and with vLLM's folder connector: run by hand.

``python tests/engines/vllm_handoff_times.py p2pkv nixl folder`` starts a prefill and a decode server for each, of
2.4 GiB each, and hands prompts off in turns. What is timed is the decode request for one token, sent when prefill has
answered: the load of the whole prompt and one step. ``alone`` is the same without a hand-off, computed by decode.
NixlConnector needs ``pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1`` in ``.venv-vllm``.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "engines"), str(_TESTS.parent)]

from vllm_server import VLLMServer, lasting_port, p2pkv  # noqa: E402

LENGTHS = (65, 257, 1025, 2049)
ROUNDS = 7
HAND_OFF = {"do_remote_decode": True, "do_remote_prefill": False}
NIXL_HAND_OFF = HAND_OFF | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"), None
)

Pair = tuple[VLLMServer, VLLMServer]


def p2pkv_pair(folder: Path) -> Pair:
    settings = {"join": [f"127.0.0.1:{lasting_port()}"], "share_prefixes": False}
    return (
        VLLMServer(folder / "p2pkv-prefill.log", p2pkv(settings | {"node_id": "p"}, role="kv_producer")),
        VLLMServer(
            folder / "p2pkv-decode.log",
            p2pkv(settings | {"node_id": "d"}, role="kv_consumer", policy="recompute"),
        ),
    )


def nixl_pair(folder: Path) -> Pair:
    def start(name: str, role: str) -> VLLMServer:
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        transfer["kv_load_failure_policy"] = "recompute"
        port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(lasting_port())}
        return VLLMServer(folder / f"nixl-{name}.log", transfer, environment=port)

    return start("prefill", "kv_producer"), start("decode", "kv_consumer")


def folder_pair(folder: Path) -> Pair:
    def start(name: str, role: str) -> VLLMServer:
        settings = {"shared_storage_path": str(folder / "kv")}
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": role,
            "kv_connector_extra_config": settings,
        }
        return VLLMServer(folder / f"folder-{name}.log", transfer)

    return start("prefill", "kv_producer"), start("decode", "kv_consumer")


PAIRS: dict[str, Callable[[Path], Pair]] = {"p2pkv": p2pkv_pair, "nixl": nixl_pair, "folder": folder_pair}


def hand_off(pair: Pair, tokens: list[int], params: dict[str, Any]) -> tuple[float, list[int]]:
    """Return the seconds of the decode request, and its ids."""
    prefill, decode = pair
    given = prefill.complete(tokens, 1, params=params).get("kv_transfer_params")
    began = time.monotonic()
    ids = decode.ids(tokens, 1, params=given)
    return time.monotonic() - began, ids


def measure(pairs: dict[str, Pair]) -> dict[tuple[str, int], list[float]]:
    times: dict[tuple[str, int], list[float]] = {}
    for turn in range(-1, ROUNDS):  # the first connects and warms up
        for n_tokens in LENGTHS:
            random = Random(f"{turn}/{n_tokens}")
            tokens = [random.randrange(300, 4000) for _ in range(n_tokens)]
            outputs = set()
            for name, pair in pairs.items():
                seconds, ids = hand_off(pair, tokens, NIXL_HAND_OFF if name == "nixl" else HAND_OFF)
                outputs.add(tuple(ids))
                if turn >= 0:
                    times.setdefault((name, n_tokens), []).append(seconds)
            began = time.monotonic()
            other = [token + 1 for token in tokens]  # which no folder holds
            next(iter(pairs.values()))[1].ids(other, 1)
            if turn >= 0:
                times.setdefault(("alone", n_tokens), []).append(time.monotonic() - began)
            assert len(outputs) == 1, f"{n_tokens} tokens: {outputs}"
    return times


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = {name: PAIRS[name](folder) for name in names}
        servers = [server for pair in pairs.values() for server in pair]
        try:
            for server in servers:
                server.wait_until_ready()
            times = measure(pairs)
            for name, pair in pairs.items():
                print(
                    f"{name}: {pair[1].prompt_tokens('external_kv_transfer')} tokens from outside, "
                    f"{pair[1].prompt_tokens('local_compute')} computed"
                )
        finally:
            for server in servers:
                server.kill()
    print(f"{'ms, median of ' + str(ROUNDS) + ' (range)':30}" + "".join(f"{n:>24}" for n in LENGTHS))
    for name in [*pairs, "alone"]:
        cells = [[s * 1e3 for s in times[name, n]] for n in LENGTHS]
        row = [f"{statistics.median(c):.1f} ({min(c):.1f}..{max(c):.1f})" for c in cells]
        print(f"{name:30}" + "".join(f"{cell:>24}" for cell in row))


if __name__ == "__main__":
    main(sys.argv[1:] or list(PAIRS))
