"""What the router learns from outside: of the directory, without being a member, and of an engine, by its sidecar."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from fake_answers import honest_pages, page_names
from heartbeats import EnginePages, served
from p2pkv import Config, Node
from p2pkv.control.secret import cluster_keys
from p2pkv.instances.engine_check import EngineCheck
from p2pkv.instances.heartbeat import Instance, Load, Role, State, checked
from p2pkv_proxy.held import Held, Place
from p2pkv_proxy.holdings import Holdings
from p2pkv_proxy.metrics import Metrics
from p2pkv_proxy.observer import DirectoryObserver
from p2pkv_proxy.page_keys import Keying
from p2pkv_proxy.prompts import Prompt, read_completion
from p2pkv_proxy.registry import Registry

SECONDS = 120.0
PAGE = 16


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("the secret of this test")
    path.chmod(0o600)
    return str(path)


def test_the_router_learns_who_holds_a_prompt_without_joining(secret: str) -> None:
    text = "a prompt of some pages, of which the first three are held by somebody: "
    with (
        Node.start(Config(node_id="holder", namespace="n", secret_file=secret, pool_size="1MiB")) as node,
        Node.start(Config(join=node.address, namespace="n", secret_file=secret, pool_size="1MiB")) as other,
    ):
        keying = Keying("n", PAGE, "bytes", "")
        tokens = keying.tokens(text)
        assert tokens is not None
        pages = np.zeros((3, 4096), np.uint8)
        node.register_memory(pages)
        assert node.publish(keying.keys(tokens)[:3], pages).all()
        registry = Registry()
        instance = Instance(
            url="http://a:1",
            role=Role.PREFILL,
            node_id="holder",
            namespace="n",
            page_size=PAGE,
            tokenizer="bytes",
        )
        registry.list_instance(checked(instance))
        observer = DirectoryObserver([other.address], cluster_keys(secret))
        holdings = Holdings(registry, observer, Metrics(registry))
        try:
            deadline = time.monotonic() + SECONDS
            prompt = Prompt("", [text], None, is_stream=False, max_tokens=1)
            while prompt.holdings != Held({Place("holder"): 3 * PAGE}):
                assert time.monotonic() < deadline, prompt.holdings_flaw
                asyncio.run(holdings.look_up(prompt))
            assert prompt.n_tokens == len(tokens)
            assert {member.node_id for member in node.members()} == {"holder", other.node_id}
            other.close()
            node.close()
            while not prompt.holdings_flaw:
                assert time.monotonic() < deadline
                asyncio.run(holdings.look_up(prompt))
        finally:
            holdings.close()


def test_texts_have_pages_by_what_engines_say_of_them(secret: str) -> None:
    """Nobody knows a tokenizer or a template here: what was said of one prompt holds for all that begin alike."""
    system = "You are an assistant who answers at some length. " * 20
    with Node.start(Config(node_id="holder", namespace="n", secret_file=secret, pool_size="1MiB")) as node:
        pages = np.zeros((12, 4096), np.uint8)
        node.register_memory(pages)
        assert node.publish(page_names(system)[:12], pages).all()
        registry = Registry()
        observer = DirectoryObserver([node.address], cluster_keys(secret))
        metrics = Metrics(registry)
        holdings = Holdings(registry, observer, metrics)
        try:
            deadline = time.monotonic() + SECONDS
            while not observer.has_view:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert looked_up(holdings, system + "What is a page?").holdings_flaw
            for question in ("What is a shard? " * 20, "What is a span? " * 20):
                holdings.learn(looked_up(holdings, system + question), honest_pages(system + question))
            holdings.learn(looked_up(holdings, system), {"version": 1, "packed": "AAAA", "name_size": 0})
            asked = looked_up(holdings, system + "What is a page? " * 20)
            while asked.holdings is None:  # it had not answered in time
                assert time.monotonic() < deadline, asked.holdings_flaw
                asked = looked_up(holdings, system + "What is a page? " * 20)
            assert asked.holdings == Held({Place("holder"): 12 * PAGE})
            assert asked.n_tokens - asked.n_to_compute == 12 * PAGE
            assert looked_up(holdings, "Another beginning. " * 50).holdings in (Held(), None)
            reports = metrics.registry.get_sample_value
            assert reports("p2pkv_proxy_page_reports_total", {"outcome": "taken"}) == 2
            assert reports("p2pkv_proxy_page_reports_total", {"outcome": "refused"}) == 1
        finally:
            holdings.close()


def looked_up(holdings: Holdings, text: str) -> Prompt:
    prompt = read_completion({"prompt": text})
    asyncio.run(holdings.look_up(prompt))
    return prompt


def test_the_sidecar_tells_a_starting_a_ready_and_a_failing_engine_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = b'vllm:num_requests_running{a="b"} 3.0\nvllm:num_requests_waiting 2.0\nvllm:num_requests_waiting_x 9\n'
    page += b'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
    page += b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
    monkeypatch.setattr(EnginePages, "page", page)
    told = Load(State.READY, running=3, waiting=2, kv_tokens=400, kv_capacity=1600)
    with served() as url:
        check = EngineCheck(url, "/health", timeout=SECONDS)
        monkeypatch.setattr(EnginePages, "status", 503)
        assert check.look() == Load(State.STARTING)
        monkeypatch.setattr(EnginePages, "status", 200)
        assert check.look() == told
        check.is_draining = True
        assert check.look() == Load(State.DRAINING, 3, 2, 400, 1600)
        check.is_draining = False
        monkeypatch.setattr(EnginePages, "status", 503)
        assert check.look().state is State.READY  # once may be an accident
    assert check.look() == Load(State.FAILING)
