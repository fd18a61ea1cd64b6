"""Spans of the router: in the client's trace, an attempt each, and the engines' parents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import aiohttp
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from front import COMPLETION, Front, run, until
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy.app import App
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.settings import Settings
from rig import Rig
from spans import exported_to

_TRACE = "0af7651916cd43dd8448eb211c80319c"
_PARENT = "b7ad6b7169203331"
_ASKED = {"traceparent": f"00-{_TRACE}-{_PARENT}-01", "tracestate": "a=b"}


class _Kept(SpanExporter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def kept() -> Iterator[_Kept]:
    """The spans that end meanwhile."""
    kept = _Kept()
    with exported_to(kept):
        yield kept


async def traced(rig: Rig, engines: list) -> Front:
    instances = tuple(engine.instance for engine in engines)
    plan = Plan(settings=Settings(), instances=instances, decode_policy="round_robin", tracing=True)
    app = App(plan)
    listening = await rig.router(app)
    front = Front(listening, app, await rig.enter_async_context(aiohttp.ClientSession()))
    await until(lambda: all(t.state.value == "ready" for t in app.registry))
    return front


def test_a_request_is_in_its_clients_trace_and_engines_are_in_its_attempts(kept: _Kept) -> None:
    async def test(rig: Rig) -> None:
        pair = [await rig.engine(Role.PREFILL), await rig.engine(Role.DECODE)]
        front = await traced(rig, pair)
        assert (await front.post(COMPLETION, **_ASKED))[0] == 200
        (request,) = kept.named("p2pkv-proxy request")
        (attempt,) = kept.named("p2pkv-proxy attempt")
        assert f"{request.context.trace_id:032x}" == _TRACE
        assert request.parent is not None
        assert f"{request.parent.span_id:016x}" == _PARENT
        assert request.attributes["p2pkv.outcome"] == "ok"
        assert attempt.parent == request.context
        assert attempt.attributes["p2pkv.prefill"] == pair[0].instance.id
        for engine in pair:
            assert engine.headers[0]["traceparent"] == f"00-{_TRACE}-{attempt.context.span_id:016x}-01"
            assert engine.headers[0]["tracestate"] == "a=b"

    run(test)


def test_every_attempt_has_a_span_and_failed_ones_say_so(kept: _Kept) -> None:
    async def test(rig: Rig) -> None:
        engines = [await rig.engine(Role.BOTH, refusal=(500, b"{}")) for _ in range(2)]
        front = await traced(rig, engines)
        assert (await front.post(COMPLETION))[0] == 500
        (request,) = kept.named("p2pkv-proxy request")
        attempts = kept.named("p2pkv-proxy attempt")
        assert [span.attributes["p2pkv.attempt"] for span in attempts] == [1, 2, 3]
        assert all(span.status.status_code is trace.StatusCode.ERROR for span in (*attempts, request))
        assert {span.context.trace_id for span in attempts} == {request.context.trace_id}

    run(test)
