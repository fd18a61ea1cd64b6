"""KV hints of vLLM's requests: pages are brought, kept, shared and let go as an orchestrator asks."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import eventually
from p2pkv import Node
from vllm_engine import EngineFake
from vllm_fakes import BLOCK, RequestFake
from vllm_instances import Open, tokens


def envelope(*actions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [
            {"action_id": str(i), "action_type": kind, "action_version": "1.0", "payload": payload}
            for i, (kind, payload) in enumerate(actions)
        ],
    }


def run(engine: EngineFake, prompt: list[int], *actions: tuple[str, dict[str, Any]]) -> RequestFake:
    """Run a request with hints, until its blocks are published."""
    request = engine.submit(prompt, {"kv_hint": envelope(*actions)} if actions else None)
    engine.run(request)
    engine.step_until(lambda: engine.is_idle)
    return request


def counted(node: Node, name: str) -> float:
    return node.counters().get(name, 0.0)


def test_a_request_is_kept_for_as_long_as_a_hint_says_or_until_one_lets_it_go(open_engine: Open) -> None:
    engine = open_engine()
    prompt = tokens(6 * BLOCK)
    run(engine, prompt, ("kv.retain", {"ttl_seconds": 60}))
    eventually(lambda: counted(engine.node, "p2pkv_pins_bytes") > 0, 30.0)
    engine.step_until(lambda: engine.counts.get("hinted_blocks_retained") == 6)
    run(engine, prompt, ("kv.evict", {}))
    eventually(lambda: counted(engine.node, "p2pkv_pins_bytes") == 0, 30.0)


def test_a_part_of_a_request_is_kept(open_engine: Open) -> None:
    engine = open_engine()
    part = {"start": 0, "end": 2 * BLOCK + 1, "duration": 60}
    run(engine, tokens(6 * BLOCK), ("kv.retain", {"directives": [part]}))
    engine.step_until(lambda: engine.counts.get("hinted_blocks_retained") == 3)


def test_what_others_have_of_a_prompt_is_brought_when_a_request_asks_for_it(open_engine: Open) -> None:
    first, second = open_engine(), open_engine()
    prompt = tokens(6 * BLOCK)
    first.run(first.submit(prompt))
    first.step_until(lambda: first.counts.get("prefix_blocks_published") == 6 and first.is_idle)
    request = run(second, [*prompt, 1], ("kv.fetch", {"source_control_endpoint": "x", "block_hashes": []}))
    assert second.is_right(request, 6)
    eventually(lambda: counted(second.node, 'p2pkv_prefetched_pages_total{outcome="brought"}') >= 5, 30.0)


def test_a_request_is_shared_with_the_instances_that_a_hint_names(open_engine: Open) -> None:
    first, second = open_engine(), open_engine()
    target = second.node.node_id
    run(first, tokens(6 * BLOCK), ("kv.share", {"target_node_ids": [target, first.node.node_id]}))
    eventually(lambda: counted(second.node, 'p2pkv_prefetched_pages_total{outcome="brought"}') == 6, 30.0)
    first.step_until(lambda: first.counts.get("hinted_blocks_shared") == 6)


def test_vllms_own_field_counts_before_the_parameters(open_engine: Open) -> None:
    engine = open_engine()
    request = RequestFake("r", tokens(6 * BLOCK), {"kv_hint": envelope(("kv.evict", {}))})
    request.kv_hints = envelope(("kv.retain", {"ttl_seconds": 60}))
    engine.requests["r"] = request
    engine.scheduler.on_new_request(request)
    engine.run(request)
    engine.step_until(lambda: engine.counts.get("hinted_blocks_retained") == 6)


@pytest.mark.parametrize("hints", ["nonsense", {"protocol_version": 1}, envelope(("kv.retain", {}))])
def test_hints_that_cannot_be_followed_cost_the_request_nothing(open_engine: Open, hints: object) -> None:
    engine = open_engine()
    request = engine.submit(tokens(6 * BLOCK), {"kv_hints": hints})
    engine.run(request)
    assert engine.is_right(request, 6)


def test_an_instance_that_keeps_no_pages_says_that_it_follows_no_hints(
    open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(role="kv_consumer")
    engine.run(engine.submit(tokens(20), {"kv_hint": envelope(("kv.prefetch", {}))}))
    assert "KV hints are not followed: this instance keeps no pages to share" in caplog.text
