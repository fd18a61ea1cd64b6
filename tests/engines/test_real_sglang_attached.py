"""Real SGLang servers whose pages their host's node has: ``make test-sglang``."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts_node import HostsNode, hosts_node
from sglang_pair import MAX_ROOM, failures
from sglang_prompts import N_PAGES, NOTICED_S, PAGE, cached, prompt, serve_anew
from sglang_server import (
    ADMIN_KEY,
    HICACHE,
    STORAGE,
    SGLangServer,
    backend,
    hicache_server,
    lasting_port,
    linker_server,
)

from cluster import eventually
from demo.xpyd.real_engines import SGLang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

ALL = N_PAGES * PAGE
SEEDS = (1, 2, 3)
LAYOUT = "page_first_direct"


@dataclass(frozen=True)
class FirstLife:
    """A server that has been killed, and the host's node that has its pages."""

    host: HostsNode
    answers: dict[int, list[int]]
    log: Path


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirstLife]:
    """Have a server compute prompts, and kill it."""
    folder = tmp_path_factory.mktemp("attached")
    with hosts_node(folder) as host:
        settings = {"node_id": "one", "attach": host.attach, "deadline": 5.0, "allocator": "shm"}
        log = folder / "one.log"
        server = hicache_server(log, layout=LAYOUT, settings=settings)
        try:
            server.wait_until_ready()
            answers = {seed: serve_anew(server, prompt(seed)) for seed in SEEDS}
        finally:
            server.kill()
        assert len({tuple(ids) for ids in answers.values()}) == len(answers), "equal ones would hide wrong KV"
        assert host.counters()["p2pkv_attach_stored_pages_total"] >= len(SEEDS) * N_PAGES
        yield FirstLife(host, answers, log)


def no_call_failed(server: SGLangServer) -> bool:
    return not [name for name in server.counters() if name.startswith("p2pkv_failed_calls_total")]


def test_a_server_that_was_killed_finds_its_pages_when_it_is_back(before: FirstLife, tmp_path: Path) -> None:
    # it is not told where the node is
    settings = {"node_id": "one", "attach": "auto", "deadline": 5.0}
    again = hicache_server(
        tmp_path / "again.log",
        layout=LAYOUT,
        settings=settings,
        options=["--admin-api-key", ADMIN_KEY],
        environment=before.host.environment,
    )
    try:
        again.wait_until_ready()
        for seed in SEEDS:
            answer = again.generate(prompt(seed))
            assert cached(answer)["storage"] == ALL
            assert answer["output_ids"] == before.answers[seed]
        # they are not its own to clear, and it says whose they are
        again.flush()
        again.admin("POST", path=f"{STORAGE}/clear")
        assert "p2pkv namespace bump" in again.log.read_text(errors="replace")
        assert cached(again.generate(prompt(1)))["storage"] == ALL
        assert no_call_failed(again)
    finally:
        again.kill()


def test_a_linker_finds_them_as_well_and_leaves_its_own(before: FirstLife, tmp_path: Path) -> None:
    settings = {"node_id": "linked", "attach": before.host.attach, "deadline": 5.0}
    linked = linker_server(tmp_path / "linked.log", settings)
    try:
        linked.wait_until_ready()
        answer = linked.generate(prompt(1))
        assert cached(answer)["all"] == ALL
        assert answer["output_ids"] == before.answers[1]
        serve_anew(linked, prompt(9))
        assert no_call_failed(linked)
    finally:
        linked.kill()


def test_a_prefill_whose_cache_is_attached_hands_over_to_a_decode(before: FirstLife, tmp_path: Path) -> None:
    bootstrap = lasting_port()
    # all that both are told is where the node is
    told = {"P2PKV_ATTACH": before.host.attach, "SGLANG_HOST_IP": "127.0.0.1", "P2PKV_DEADLINE": "5"}
    extra = json.dumps(backend(lasting_port(), {}))
    storage = ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", extra]
    cache = [*HICACHE, "--hicache-mem-layout", LAYOUT, *storage]
    roles = {"prefill": [*SGLang.PREFILL, *cache], "decode": SGLang.DECODE}
    with ExitStack() as stack:
        servers = {}
        for name, options in roles.items():
            metrics_port = lasting_port()
            servers[name] = SGLangServer(
                tmp_path / f"{name}.log",
                SGLang.paired(options, bootstrap),
                environment=told | {"P2PKV_METRICS_PORT": str(metrics_port)},
                metrics_port=metrics_port,
            )
            stack.callback(servers[name].kill)
        prefill, decode = servers["prefill"], servers["decode"]
        for server in servers.values():
            server.wait_until_ready()
        eventually(lambda: before.host.counters()["p2pkv_members"] == 3, NOTICED_S)
        for seed in SEEDS:
            place = {
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": bootstrap,
                "bootstrap_room": random.randrange(1, MAX_ROOM),
            }
            asked = threading.Thread(target=prefill.generate, args=(prompt(seed),), kwargs=place, daemon=True)
            asked.start()
            assert decode.generate(prompt(seed), **place)["output_ids"] == before.answers[seed]
            asked.join(60.0)
        assert prefill.metrics()["sglang:cached_tokens_total"] >= ALL, "what the first life left was found"
        assert decode.counters()["p2pkv_granted_rows_total"] > 0
        assert not failures(prefill)
        assert not failures(decode)
