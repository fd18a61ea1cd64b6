"""Real vLLM servers hand KV from prefill to decode, and share prefixes, through p2pkv: ``make test-vllm``.

That the outputs are equal proves little, since vLLM may compute again what was not loaded. So each test also asks
vLLM where the prompt's tokens came from, and p2pkv how many loads failed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm_server import BLOCK, VLLMServer, lasting_port, p2pkv

from cluster import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LENGTHS = (7, 31, 32, 33, 63, 64, 65, 100, 257, 511, 1000, 1025)
LEASE_S = 25.0
LOAD_S = 15.0
"""Cores that are shared with much else may stand still for seconds."""
NOTICED_S = 40.0


def prompt(n_tokens: int, seed: int) -> list[int]:
    random = Random(f"{n_tokens}/{seed}")
    return [random.randrange(300, 4000) for _ in range(n_tokens)]


class Servers:
    """One prefill server and two that decode: one computes again what it can't load, one fails the request."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._settings = {
            "join": [f"127.0.0.1:{lasting_port()}"],
            "transfer_lease": LEASE_S,
            "load_deadline": LOAD_S,
        }
        self._started: list[VLLMServer] = []
        self.prefill = self._start("prefill", role="kv_producer")
        self.decode = self._start("decode", role="kv_both", policy="recompute")
        self.strict = self._start("strict", role="kv_consumer", policy="fail")
        for server in self._started:
            server.wait_until_ready()

    def _start(self, name: str, **options: str) -> VLLMServer:
        log = self._folder / f"{name}-{len(self._started)}.log"
        self._started.append(VLLMServer(log, p2pkv({"node_id": name, **self._settings}, **options)))
        return self._started[-1]

    def restart_prefill(self) -> None:
        self.prefill = self._start("prefill", role="kv_producer")
        self.prefill.wait_until_ready()

    def kill(self) -> None:
        for server in self._started:
            server.kill()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Start them once for all tests: each takes 2.4 GiB, and minutes where cores are scarce."""
    servers = Servers(tmp_path_factory.mktemp("vllm"))
    yield servers
    servers.kill()


class Difference:
    """What a server's counters say since this was made."""

    def __init__(self, server: VLLMServer) -> None:
        self._server = server
        self._before = self._read()

    def _read(self) -> dict[str, int]:
        tokens = {s: self._server.prompt_tokens(s) for s in ("external_kv_transfer", "local_compute")}
        names = (
            "handoffs_failed",
            "handoffs_loaded",
            "handoffs_taken",
            "handoffs_expired",
            "handoffs_offered",
        )
        return tokens | {name: self._server.counted(name) for name in names}

    def now(self, name: str) -> int:
        return self._read()[name] - self._before[name]


def test_decode_goes_on_as_a_single_instance_would(servers: Servers) -> None:
    prompts = [prompt(n, seed=1) for n in LENGTHS]
    alone = [servers.prefill.ids(tokens) for tokens in prompts]
    assert len({tuple(ids) for ids in alone}) == len(alone), (
        "outputs that are all the same would hide wrong KV"
    )

    offered, loaded = Difference(servers.prefill), Difference(servers.decode)
    for tokens, ids in zip(prompts, alone, strict=True):
        assert servers.decode.ids(tokens, params=servers.prefill.prefill(tokens)) == ids
    eventually(lambda: loaded.now("handoffs_loaded") == len(prompts), NOTICED_S)
    assert loaded.now("external_kv_transfer") == sum(LENGTHS)
    assert loaded.now("local_compute") == 0
    assert loaded.now("handoffs_failed") == 0

    # taken is told to prefill, which frees the blocks
    eventually(lambda: offered.now("handoffs_taken") == len(prompts), NOTICED_S)
    assert offered.now("handoffs_expired") == 0
    eventually(lambda: servers.prefill.count("vllm:kv_cache_usage_perc") == 0, NOTICED_S)


def test_handoffs_at_the_same_time_do_not_mix(servers: Servers) -> None:
    prompts = [prompt(n, seed) for seed in (2, 3) for n in (33, 64, 257, 511)]
    loaded = Difference(servers.strict)

    def hand_off(tokens: list[int]) -> list[int]:
        return servers.strict.ids(tokens, params=servers.prefill.prefill(tokens))

    with ThreadPoolExecutor(len(prompts)) as clients:
        outputs = list(clients.map(hand_off, prompts))
    assert outputs == [servers.prefill.ids(tokens) for tokens in prompts]
    eventually(lambda: loaded.now("handoffs_loaded") == len(prompts), NOTICED_S)
    assert loaded.now("external_kv_transfer") == sum(map(len, prompts))
    assert loaded.now("handoffs_failed") == 0


def changed(params: dict[str, Any], **fields: object) -> dict[str, Any]:
    """Return hand-off parameters with other fields than prefill gave them."""
    other = copy.deepcopy(params)
    other["p2pkv"].update(fields)
    return other


def of_rank(params: dict[str, Any], node_id: str, boot: str) -> dict[str, Any]:
    """Return them with another node for their only rank, whose layers are the same."""
    return changed(params, ranks=[[node_id, boot, *params["p2pkv"]["ranks"][0][2:]]])


def of_blocks(params: dict[str, Any], n_tokens: int) -> dict[str, Any]:
    """Return them with blocks of another size."""
    node_id, boot, layout, shares = params["p2pkv"]["ranks"][0]
    others = [share | {"tile_tokens": n_tokens, "block_tokens": n_tokens} for share in shares]
    return changed(params, ranks=[[node_id, boot, layout, others]])


BREAK = {
    "of an earlier boot": lambda given: of_rank(given, "prefill", "1"),
    "of a node that is gone": lambda given: of_rank(given, "nobody", "1"),
    "never offered": lambda given: changed(given, name="made up"),
    "of another prompt": lambda given: changed(given, prompt="0" * 32),
    "of another block size": lambda given: of_blocks(given, 64),
    "malformed": lambda given: changed(given, n_tokens="many"),
    "of another connector": lambda given: {"do_remote_prefill": True, "remote_block_ids": [1, 2]},
}


def test_loads_that_fail_are_computed_or_fail_by_policy(servers: Servers) -> None:
    recomputed, refused = Difference(servers.decode), Difference(servers.strict)
    for seed, damage in enumerate(BREAK.values(), start=10):
        tokens = prompt(100, seed)
        given = damage(servers.prefill.prefill(tokens))
        assert servers.decode.ids(tokens, params=given) == servers.prefill.ids(tokens)
        assert servers.strict.refusal(tokens, params=given) == 500
    n = len(BREAK)
    eventually(lambda: recomputed.now("handoffs_failed") == refused.now("handoffs_failed") == n, NOTICED_S)
    assert recomputed.now("handoffs_loaded") == refused.now("handoffs_loaded") == 0
    said = "blocks hold 64 tokens there and 32 here, and attention on CPUs packs each as a whole"
    assert said in servers.strict.log.read_text(errors="replace")

    # the engines live on
    tokens = prompt(100, seed=30)
    for server in (servers.decode, servers.strict):
        assert server.ids(tokens, params=servers.prefill.prefill(tokens)) == servers.prefill.ids(tokens)


def test_what_nobody_takes_is_freed_when_its_lease_ends(servers: Servers) -> None:
    offered = Difference(servers.prefill)
    given = servers.prefill.prefill(prompt(300, seed=40))
    assert servers.prefill.count("vllm:kv_cache_usage_perc") > 0
    eventually(lambda: offered.now("handoffs_expired") >= 1, LEASE_S + NOTICED_S)
    eventually(lambda: servers.prefill.count("vllm:kv_cache_usage_perc") == 0, NOTICED_S)
    tokens = prompt(300, seed=40)
    assert servers.decode.ids(tokens, params=given) == servers.prefill.ids(tokens)


def test_a_prefix_that_one_server_has_computed_is_loaded_by_another(servers: Servers) -> None:
    tokens = prompt(10 * BLOCK + 9, seed=50)
    published = servers.prefill.counted("prefix_blocks_published")
    ids = servers.prefill.ids(tokens)
    eventually(lambda: servers.prefill.counted("prefix_blocks_published") >= published + 10, NOTICED_S)
    loaded = Difference(servers.decode)
    assert servers.decode.ids(tokens) == ids
    assert loaded.now("external_kv_transfer") == 10 * BLOCK
    assert loaded.now("local_compute") == 9

    # another prompt that begins alike has of it what it needs
    other = tokens[: 4 * BLOCK] + prompt(70, seed=51)
    loaded = Difference(servers.decode)
    assert servers.decode.ids(other) == servers.prefill.ids(other)
    assert loaded.now("external_kv_transfer") == 4 * BLOCK
    assert servers.decode.counted("prefix_blocks_missed") == 0


def test_a_killed_prefill_costs_its_own_requests_only(servers: Servers) -> None:
    prompts = [prompt(n, seed=60) for n in (65, 257, 511)]
    alone = [servers.prefill.ids(tokens) for tokens in prompts]
    given = [servers.prefill.prefill(tokens) for tokens in prompts]
    running = prompt(200, seed=61)
    with ThreadPoolExecutor(1) as clients:
        before = servers.decode.count("vllm:generation_tokens_total")
        started = clients.submit(servers.decode.ids, running, 400, params=servers.prefill.prefill(running))
        eventually(lambda: servers.decode.count("vllm:generation_tokens_total") > before, NOTICED_S)
        servers.prefill.kill()
        for tokens, ids, params in zip(prompts, alone, given, strict=True):
            assert servers.decode.ids(tokens, params=params) == ids
        assert len(started.result()) == 400
    assert servers.strict.refusal(prompts[0], params=given[0]) == 500

    servers.restart_prefill()
    loaded = Difference(servers.decode)
    for tokens, ids in zip(prompts, alone, strict=True):
        assert servers.decode.ids(tokens, params=servers.prefill.prefill(tokens)) == ids
    eventually(lambda: loaded.now("handoffs_loaded") == len(prompts), NOTICED_S)
    assert loaded.now("local_compute") == 0
    assert servers.decode.ids(prompts[0], params=given[0]) == alone[0], "what the dead one offered is gone"
