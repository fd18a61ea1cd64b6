"""What vLLM's connector does for a request is named after it in spans, from look-ups to both sides of a hand-off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spans import exported_to
from vllm_engine import EngineFake
from vllm_fakes import BLOCK
from vllm_instances import Open, hand_off, load, load_prefix, tokens

TRACED = {"tracing": True}


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    with exported_to(exporter):
        yield exporter


def _named(exporter: InMemorySpanExporter, *names: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name in names]


def _requests(span: ReadableSpan) -> list[object]:
    attributes: dict[str, Any] = {**(span.attributes or {})}
    return [attributes.get("p2pkv.request"), *attributes.get("p2pkv.requests", ())]


def _of(exporter: InMemorySpanExporter, name: str, request_id: str) -> list[ReadableSpan]:
    """Return the spans of one kind that are about a request."""
    return [span for span in _named(exporter, name) if request_id in _requests(span)]


def _publish(engine: EngineFake, prompt: list[int], n_blocks: int) -> str:
    request = engine.submit(prompt)
    engine.run(request)
    engine.step_until(lambda: engine.counts.get("prefix_blocks_published", 0) >= n_blocks and engine.is_idle)
    return request.request_id


def test_look_ups_loads_and_publishes_of_vllm_are_named_after_their_requests(
    open_engine: Open, exported: InMemorySpanExporter
) -> None:
    first, second = open_engine(TRACED), open_engine(TRACED, role="kv_consumer")
    prompt = tokens(6 * BLOCK)
    published = _publish(first, [*prompt, 7], 6)
    loaded = load_prefix(second, [*prompt, 1, 2], 6 * BLOCK).request_id
    assert published != loaded
    assert sum(span.attributes["p2pkv.hits"] for span in _of(exported, "p2pkv.publish", published)) == 6  # type: ignore[index, misc]
    [look_up] = _of(exported, "p2pkv.whereabouts", loaded)
    assert look_up.attributes is not None
    assert look_up.attributes["p2pkv.hits"] == 6
    [fetch] = _of(exported, "p2pkv.fetch", loaded)
    assert fetch.attributes is not None
    assert fetch.attributes["p2pkv.hits"] == 6
    for span in exported.get_finished_spans():
        assert {"p2pkv.request", "p2pkv.requests"} & {*(span.attributes or {})}, span.name


def test_a_hand_off_of_vllm_is_named_after_the_request_of_each_side(
    open_engine: Open, exported: InMemorySpanExporter
) -> None:
    prefill, decode = open_engine(TRACED, role="kv_producer"), open_engine(TRACED, role="kv_consumer")
    given = hand_off(prefill, tokens(3 * BLOCK))
    request = load(decode, tokens(3 * BLOCK), given)
    assert request.loaded_tokens == 3 * BLOCK
    prefill.step_until(lambda: prefill.is_idle)
    offers, gets = _named(exported, "p2pkv.offer"), _named(exported, "p2pkv.get_async")
    assert {span.attributes["p2pkv.request"] for span in gets} == {request.request_id}  # type: ignore[index]
    [whole] = [span for span in offers if span.attributes["p2pkv.offer"] == gets[0].attributes["p2pkv.offer"]]  # type: ignore[index]
    assert whole.attributes is not None
    assert str(whole.attributes["p2pkv.offer"]).startswith(str(whole.attributes["p2pkv.request"]))
