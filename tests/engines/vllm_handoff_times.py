"""How long a hand-off takes with p2pkv, with NixlConnector and with vLLM's folder connector: run by hand.

``python tests/engines/vllm_handoff_times.py p2pkv nixl folder`` starts a prefill and a decode server for each, of
2.4 GiB each, and hands every prompt off with each of them, in turns. ``decode`` is the time of the decode request for
one token, sent when prefill has answered: the load of the whole prompt and one step. ``both`` is that and the prefill
request, in which the folder is written. ``alone`` is a prompt that one server computes, without a hand-off.
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
sys.path[:0] = [str(_TESTS / "support"), str(_TESTS / "engines"), str(_TESTS.parent)]

from vllm_server import BLOCK, VLLMServer, lasting_port, p2pkv  # noqa: E402

LENGTHS = (66, 258, 1026, 2050)
"""The folder connector finds a prompt again unless it is just one token longer than whole blocks."""
ROUNDS = 7
HAND_OFF = {"do_remote_decode": True, "do_remote_prefill": False}
NIXL_HAND_OFF = HAND_OFF | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"), None
)

Pair = tuple[VLLMServer, VLLMServer]
Times = dict[tuple[str, str, int], list[float]]
"""Seconds, by pair, what was timed, and tokens."""


def p2pkv_pair(folder: Path, name: str = "p2pkv", **of_decode: object) -> Pair:
    settings: dict[str, object] = {"join": [f"127.0.0.1:{lasting_port()}"], "share_prefixes": False}
    return (
        VLLMServer(folder / f"{name}-prefill.log", p2pkv(settings | {"node_id": "p"}, role="kv_producer")),
        VLLMServer(
            folder / f"{name}-decode.log",
            p2pkv(settings | {"node_id": "d"} | of_decode, role="kv_consumer", policy="recompute"),
        ),
    )


def layers_pair(folder: Path) -> Pair:
    return p2pkv_pair(folder, "layers", layer_deadline=1.0)


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


PAIRS: dict[str, Callable[[Path], Pair]] = {
    "p2pkv": p2pkv_pair,
    "layers": layers_pair,
    "nixl": nixl_pair,
    "folder": folder_pair,
}
"""``layers`` is p2pkv with ``layer_deadline``."""
_WHOLE_BLOCKS = ("folder", "layers")
"""Those that load whole blocks only, and leave the end of a prompt to decode."""


def hand_off(pair: Pair, tokens: list[int], params: dict[str, Any]) -> tuple[float, float, list[int]]:
    """Return the seconds of the prefill request and of the decode request, and the latter's ids."""
    prefill, decode = pair
    began = time.monotonic()
    given = prefill.complete(tokens, 1, params=params).get("kv_transfer_params")
    handed = time.monotonic()
    ids = decode.ids(tokens, 1, params=given)
    return handed - began, time.monotonic() - handed, ids


def measure(pairs: dict[str, Pair], rounds: range) -> Times:
    """Hand every prompt off with each pair, the pairs in another order each time."""
    times: Times = {}
    order = list(pairs)
    for turn in rounds:
        for n_tokens in LENGTHS:
            random = Random(f"{turn}/{n_tokens}")
            tokens = [random.randrange(300, 4000) for _ in range(n_tokens)]
            outputs = set()
            order = order[1:] + order[:1]
            for name in order:
                params = NIXL_HAND_OFF if name == "nixl" else HAND_OFF
                prefill_s, decode_s, ids = hand_off(pairs[name], tokens, params)
                outputs.add(tuple(ids))
                times.setdefault((name, "decode", n_tokens), []).append(decode_s)
                times.setdefault((name, "both", n_tokens), []).append(prefill_s + decode_s)
            assert len(outputs) == 1, f"{n_tokens} tokens: {outputs}"
    return times


def alone(server: VLLMServer) -> Times:
    """Have the same lengths computed by one server without a hand-off."""
    times: Times = {}
    for turn in range(-1, ROUNDS):
        for n_tokens in LENGTHS:
            random = Random(f"alone {turn}/{n_tokens}")
            began = time.monotonic()
            server.ids([random.randrange(300, 4000) for _ in range(n_tokens)], 1)
            if turn >= 0:
                times.setdefault(("alone", "both", n_tokens), []).append(time.monotonic() - began)
    return times


def sources(decode: VLLMServer) -> tuple[int, int]:
    """Return how many prompt tokens were loaded and how many computed, by vLLM's own count."""
    return decode.prompt_tokens("external_kv_transfer"), decode.prompt_tokens("local_compute")


def flaw(name: str, before: tuple[int, int], after: tuple[int, int]) -> str | None:
    """Say what was not loaded of what was timed."""
    loaded, computed = after[0] - before[0], after[1] - before[1]
    print(f"{name}: {loaded} prompt tokens from outside, {computed} computed")
    whole = sum((length - 2) // BLOCK * BLOCK if name in _WHOLE_BLOCKS else length for length in LENGTHS)
    is_whole = (loaded, computed) == (ROUNDS * whole, ROUNDS * (sum(LENGTHS) - whole))
    return None if is_whole else f"{name} should have loaded {ROUNDS * whole} tokens"


def show(times: Times) -> None:
    print(f"{f'ms, median of {ROUNDS} (range)':24}" + "".join(f"{n:>22} tokens" for n in LENGTHS))
    for name, kind in dict.fromkeys((name, kind) for name, kind, _ in times):
        cells = [[s * 1e3 for s in times[name, kind, n]] for n in LENGTHS]
        row = [f"{statistics.median(c):.1f} ({min(c):.1f}..{max(c):.1f})" for c in cells]
        print(f"{name + ', ' + kind:24}" + "".join(f"{cell:>29}" for cell in row))


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = {name: PAIRS[name](folder) for name in names}
        servers = [server for pair in pairs.values() for server in pair]
        try:
            for server in servers:
                server.wait_until_ready()
            measure(pairs, range(-2, 0))  # connects and warms up
            before = {name: sources(pair[1]) for name, pair in pairs.items()}
            times = measure(pairs, range(ROUNDS))
            flaws = [flaw(name, before[name], sources(pair[1])) for name, pair in pairs.items()]
            times |= alone(next(iter(pairs.values()))[1])
        finally:
            for server in servers:
                server.kill()
    show(times)
    assert not any(flaws), flaws


if __name__ == "__main__":
    main(sys.argv[1:] or list(PAIRS))
