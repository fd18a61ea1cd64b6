"""What the router tells of requests, in spans, its log and counts, beside what clients and engines have seen.

Engines break off, refuse and hang at random. Requests are for tokens, or for endpoints that are only passed on.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yarl
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fake_answers import tokens_of
from fake_engines import FakeEngine
from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy.app import App
from p2pkv_proxy.metrics import OUTCOMES
from p2pkv_proxy.passing import PASSED
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.settings import Settings
from patience import PATIENCE
from rig import Rig
from spans import exported_to

_ROUNDS, _AT_ONCE = 10, 6
_UNKNOWN = ["/v1/load_lora_adapter", "/flush_cache", "/x/%2e%2e/y"]
"""Paths that may change something: they are asked for once."""
_MOODS = ["breaks off", "refuses", "is another service", "hangs"]
_WHOLE = frozenset({200, 201})


@dataclass(slots=True)
class Asked:
    """One request, and what its client saw of it."""

    trace: str
    parent: str
    path: str
    is_whole: bool = False
    status: int | None = None
    """None: the answer broke off."""
    is_once: bool = False


@dataclass(slots=True)
class Seen:
    """What others have seen, by trace."""

    engines: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Instance, and the span that it was told to be in."""
    spans: dict[str, list[ReadableSpan]] = field(default_factory=dict)
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


class Client:
    """Asks, and judges what it is answered."""

    def __init__(self, rng: random.Random, tally: Tally, session: aiohttp.ClientSession, url: str) -> None:
        self._rng = rng
        self._tally = tally
        self._session = session
        self._url = url
        self.asked: list[Asked] = []

    async def ask(self) -> None:
        """Ask for something."""
        trace, parent = f"{self._rng.getrandbits(128):032x}", f"{self._rng.getrandbits(63) + 1:016x}"
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        if self._rng.random() < 0.5:
            await self._generate(Asked(trace, parent, "/v1/completions"), headers)
        else:
            is_known = self._rng.random() < 0.6
            path = self._rng.choice(sorted(PASSED) if is_known else _UNKNOWN)
            await self._pass(Asked(trace, parent, path, is_once=not is_known), headers)

    async def _generate(self, asked: Asked, headers: dict[str, str]) -> None:
        self.asked.append(asked)
        n, is_stream = self._rng.randint(1, 12), self._rng.random() < 0.6
        body = {"prompt": asked.trace, "max_tokens": n, "stream": is_stream, "temperature": 1}
        raw = await self._send(asked, json.dumps(body).encode(), headers)
        if raw is None or asked.status != 200:
            return
        if not is_stream:
            text = json.loads(raw)["choices"][0]["text"]
        else:
            events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
            if events[-1] != b"[DONE]":
                return
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        if text != "".join(tokens_of(asked.trace, n)):
            raise Broken(f"{asked} was answered with {text!r}")
        asked.is_whole = True

    async def _pass(self, asked: Asked, headers: dict[str, str]) -> None:
        self.asked.append(asked)
        query = self._rng.choice(["", "?a=b&a=%0d%0ac", "?%c3%bc=%00"])
        body = self._rng.choice(
            ["", "no json", '{"model":  "m", "x": [1.0, 1e3]}', '["\u00e9\\u0000"]', "{" * 50]
        )
        body += asked.trace if not body.endswith("}") and body else ""
        kind = self._rng.choice(["application/json", "multipart/form-data; boundary=x"])
        raw = await self._send(asked, body.encode(), headers | {"content-type": kind}, query)
        if raw is None or asked.status != 201:
            return
        told = json.loads(raw)
        if told["body"] != body or told["kind"] != kind or told["path"] != f"{asked.path}?{query[1:]}":
            raise Broken(f"{asked} of {kind} with {body!r} arrived as {told}")
        asked.is_whole = True
        self._tally["passed on"] += 1

    async def _send(
        self, asked: Asked, body: bytes, headers: dict[str, str], query: str = ""
    ) -> bytes | None:
        url = yarl.URL(self._url + asked.path + query, encoded=True)  # sent as it is
        try:
            async with self._session.post(url, data=body, headers=headers) as answer:
                asked.status = answer.status
                return await answer.read()
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError):
            asked.status = None
            return None


def _judge(asked: Asked, seen: Seen, tally: Tally) -> str:
    """Demand that what was told of a request is what has happened; return its outcome."""
    spans, lines = seen.spans.get(asked.trace, []), seen.lines.get(asked.trace, [])
    requests = [span for span in spans if span.name == "p2pkv-proxy request"]
    attempts = [span for span in spans if span.name == "p2pkv-proxy attempt"]
    if len(requests) != 1 or len(lines) != 1:
        raise Broken(f"{asked} has {len(requests)} spans and {len(lines)} lines in the log")
    (request,), (line,) = requests, lines
    outcome = str(line["outcome"])
    if (request.attributes or {})["p2pkv.outcome"] != outcome:
        raise Broken(f"{asked} ended as {outcome} in the log, and otherwise in its span")
    if request.parent is None or f"{request.parent.span_id:016x}" != asked.parent:
        raise Broken(f"{asked} has a span that is not the client's child")
    if asked.is_whole != (outcome == "ok"):
        raise Broken(f"{asked} ended as {outcome}")
    if line["attempts"] != len(attempts):
        raise Broken(f"{asked} has {len(attempts)} attempts in spans, and {line['attempts']} in the log")
    told = {}
    for span in attempts:
        assert span.context is not None
        attributes = span.attributes or {}
        if span.parent is None or request.context is None or span.parent.span_id != request.context.span_id:
            raise Broken(f"{asked} has an attempt that is not in its request")
        told[f"{span.context.span_id:016x}"] = {attributes["p2pkv.decode"], attributes["p2pkv.prefill"]}
    numbers = sorted(int(str((span.attributes or {})["p2pkv.attempt"])) for span in attempts)
    if numbers != [*range(1, len(attempts) + 1)]:
        raise Broken(f"{asked} has attempts {numbers}")
    engines = seen.engines.get(asked.trace, [])
    for instance, span_id in engines:
        if instance not in told.get(span_id, ()):
            raise Broken(f"{asked} came to {instance} in a span of {told.get(span_id)}")
    if asked.is_once and len(engines) > 1:
        raise Broken(f"{asked} may change something, and was asked for {len(engines)} times")
    tally["attempts"] += len(attempts)
    tally[f"ended as {outcome}"] += 1
    return outcome


def _note_engines(engines: list[FakeEngine], seen: Seen) -> None:
    for engine in engines:
        for headers in (*engine.headers, *engine.passed_headers):
            _, trace, span, _ = headers["traceparent"].split("-")
            seen.engines.setdefault(trace, []).append((engine.instance.id, span))


async def _schedule(rng: random.Random, tally: Tally, stop: Stop, log: Path) -> tuple[list[Asked], App, Seen]:
    seen = Seen()
    async with Rig() as rig:
        engines = [await rig.engine(Role.BOTH) for _ in range(3)]
        for engine in engines[1:]:
            engine.mood = lambda: rng.choice(_MOODS) if rng.random() < 0.3 else ""
            engine.breaks = lambda: "cut" if rng.random() < 0.05 else ""
        settings = Settings(answer_timeout=0.5, request_timeout=3.0, pass_unknown=True)
        plan = Plan(
            settings=settings,
            instances=tuple(engine.instance for engine in engines),
            prefill_policy="random",
            decode_policy="random",
            access_log=str(log),
            tracing=True,
        )
        app = App(plan)
        listening = await rig.router(app)
        while not all(tracked.state.value == "ready" for tracked in app.registry):
            await asyncio.sleep(0.005)
        session = await rig.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60 * PATIENCE))
        )
        client = Client(rng, tally, session, listening.url)
        for _ in range(_ROUNDS):
            await asyncio.gather(*(client.ask() for _ in range(_AT_ONCE)))
            if stop():
                break
        _note_engines(engines, seen)
        for engine in engines:
            if engine.crashed:
                raise Broken(f"an engine got what crashes it: {engine.crashed}")
    return client.asked, app, seen


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Run one schedule, and look at what was told of it when all has ended."""
    kept = InMemorySpanExporter()
    with tempfile.TemporaryDirectory() as folder, exported_to(kept):
        log = Path(folder) / "access.log"
        asked, app, seen = asyncio.run(_schedule(random.Random(seed), tally, stop, log))
        for line in map(json.loads, log.read_text().splitlines()):
            seen.lines.setdefault(str(line["trace_id"]), []).append(line)
        for span in kept.get_finished_spans():
            assert span.context is not None
            seen.spans.setdefault(f"{span.context.trace_id:032x}", []).append(span)
    outcomes = Counter(_judge(one, seen, tally) for one in asked)
    for outcome in OUTCOMES:
        if (counted := app.metrics.requests.labels(outcome)._value.get()) != outcomes[outcome]:
            raise Broken(f"{counted} requests are counted as {outcome}, and {outcomes[outcome]} ended so")
    gc.collect()  # tasks and their connections are in cycles


HUNT = Hunt(
    "router_told",
    "spans, the access log and counts say what clients and engines have seen; what is passed on arrives as sent",
    run,
    effects=("passed on", "attempts", "ended as ok", "ended as broken_off"),
    enough=20,
)
