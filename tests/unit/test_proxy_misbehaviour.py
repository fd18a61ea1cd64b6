"""Engines and clients that misbehave: nobody else is harmed, and what they hold is given back."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from types import SimpleNamespace

import aiohttp
import pytest

from fake_answers import tokens_of
from front import COMPLETION, joined, run, start, until
from p2pkv.instances.heartbeat import Mode, Role
from p2pkv_proxy.breaker import FIRST_PAUSE_S, JUDGED, WINDOW, WINDOW_S, Breaker, Phase
from rig import Rig

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
N_REQUESTS = 40


@pytest.mark.parametrize("mood", ["breaks off", "refuses", "is another service", "never ends"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_one_bad_engine_costs_a_few_requests_at_most(mood: str, is_stream: bool) -> None:
    async def test(rig: Rig) -> None:
        bad, good = await rig.engine(Role.BOTH), await rig.engine(Role.BOTH)
        bad.mood = lambda: mood
        front = await start(rig, [bad, good])
        n_broken = 0
        for _ in range(N_REQUESTS):
            if is_stream:
                n_broken += joined(await front.events(COMPLETION)) != "".join(tokens_of("some prompt", 5))
            else:
                n_broken += (await front.post(COMPLETION))[0] != 200
        tracked = front.app.registry.get(bad.instance.id)
        assert tracked is not None
        assert tracked.breaker.opened > 0
        assert (
            n_broken <= 2 + tracked.breaker.opened
        )  # three in a row, and one each time that it is tried again

    run(test)


def test_what_every_instance_refuses_is_the_requests_fault() -> None:
    async def test(rig: Rig) -> None:
        engines = [await rig.engine(Role.BOTH) for _ in range(2)]
        for engine in engines:
            engine.mood = lambda: "refuses"
        front = await start(rig, engines)
        for _ in range(N_REQUESTS):
            status, answer, _ = await front.post(COMPLETION)
            assert (status, answer) == (404, {"error": "no such model"})
        assert all(tracked.breaker.phase is Phase.CLOSED for tracked in front.app.registry)

    run(test)


@pytest.mark.parametrize("body", [b"{", json.dumps(COMPLETION).encode()])
def test_a_client_that_pipelines_and_reads_nothing_keeps_nobody_out(body: bytes) -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await rig.engine(Role.BOTH)], client_timeout=0.3, max_in_flight=4)
        request = POST + b"content-length: %d\r\n\r\n" % len(body) + body
        writers = []
        for _ in range(6):
            _, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1024)
            writer.write(request * 10_000)
            writers.append(writer)
        await until(lambda: all(writer.transport.is_closing() for writer in writers))
        await until(lambda: front.app._serving.in_flight == 0)
        assert await front.text(COMPLETION) == "".join(tokens_of("some prompt", 5))

    run(test)


def test_a_client_that_pipelines_and_leaves_is_nothing_to_complain_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH)
        engine.gate.clear()
        front = await start(rig, [engine])
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        body = json.dumps(COMPLETION).encode()
        writer.write((POST + b"content-length: %d\r\n\r\n" % len(body) + body) * 3)
        await until(lambda: len(engine.requests) == 1)
        writer.transport.abort()
        await until(lambda: front.app._serving.in_flight == 0)

    run(test)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_client_that_takes_no_refusal_loses_its_place() -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await rig.engine(Role.BOTH)], client_timeout=0.3)
        has_hung_up = asyncio.Event()
        scope = {
            "path": "/v1/completions",
            "method": "POST",
            "headers": [],
            "p2pkv.on_gone": set(),
            "p2pkv.hang_up": has_hung_up.set,
            "p2pkv.transport": SimpleNamespace(is_closing=lambda: False),
        }

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b"{"}

        async def send(message: object) -> None:
            await asyncio.Event().wait()

        await front.app._serving.serve(scope, receive, send)
        assert has_hung_up.is_set()
        assert front.app._serving.in_flight == 0

    run(test)


def test_a_whole_answer_that_nobody_takes_is_let_go() -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await rig.engine(Role.BOTH)], client_timeout=0.3)
        _, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1024)
        body = json.dumps(COMPLETION | {"max_tokens": 2_000_000}).encode()
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: front.app._serving.in_flight == 1)
        await until(lambda: front.app._serving.in_flight == 0)
        assert await front.metric("p2pkv_proxy_requests_total", outcome="client_gone") == 1
        writer.transport.abort()

    run(test)


@pytest.mark.parametrize("why", ["its time is over", "the router ends"])
def test_a_whole_answer_that_is_cut_off_ends_at_once_and_without_more_bytes(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(rig: Rig) -> None:
        # whose client takes nothing, which must not hold it up
        engines = [await rig.engine(Role.BOTH)]
        front = await start(rig, engines, request_timeout=3600.0, client_timeout=3600.0)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1024)
        body = json.dumps(COMPLETION | {"max_tokens": 2_000_000}).encode()
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        if why == "the router ends":
            front.app.end_requests()
        else:
            for exchange in front.app._serving._exchanges:
                exchange._waits.deadline = 0.0
        await until(lambda: front.app._serving.in_flight == 0)
        n_bytes = 0
        with suppress(ConnectionError):  # aborted, so that nobody takes it for whole
            while part := await reader.read(1 << 20):
                n_bytes += len(part)
        assert n_bytes < length
        writer.close()

    run(test)
    assert "Exception" not in caplog.text


def test_others_are_served_while_an_event_never_ends() -> None:
    async def test(rig: Rig) -> None:
        bad, good = await rig.engine(Role.BOTH), await rig.engine(Role.BOTH)
        bad.mood = lambda: "never ends"
        front = await start(rig, [bad, good], attempts=1)
        events = [asyncio.ensure_future(_events(front.session, front.url)) for _ in range(8)]
        outcomes = [await one for one in events]
        assert all(b"[DONE]" in raw or b"more than" in raw for raw in outcomes)
        assert any(b"[DONE]" in raw for raw in outcomes)

    run(test)


async def _events(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.post(url + "/v1/completions", json=COMPLETION | {"stream": True}) as response:
        return await response.read()


def test_a_breaker_opens_when_half_of_the_attempts_fail() -> None:
    breaker = Breaker()
    for i in range(JUDGED):
        assert breaker.phase is Phase.CLOSED
        if i % 2:
            breaker.failed(object(), float(i))
        else:
            breaker.succeeded(object(), float(i))
    assert breaker.phase is Phase.OPEN
    assert breaker.allows(JUDGED + FIRST_PAUSE_S)


def test_a_breaker_forgets_failures_of_long_ago() -> None:
    breaker = Breaker()
    for i in range(2 * WINDOW):
        now = i * WINDOW_S / 8
        if i % 2:
            breaker.failed(object(), now)
        else:
            breaker.succeeded(object(), now)
        assert breaker.phase is Phase.CLOSED  # of eight ends nothing is concluded
        assert breaker.n_failed(now) <= 4
    assert breaker.n_failed(now + WINDOW_S) == 0


def test_a_prefill_that_fails_behind_the_decodes_headers_is_heard_and_blamed() -> None:
    async def test(rig: Rig) -> None:
        broken = await rig.engine(Role.PREFILL, Mode.SGLANG, refusal=(500, b"{}"), gate=asyncio.Event())
        good = await rig.engine(Role.PREFILL, Mode.SGLANG)
        decode = await rig.engine(Role.DECODE, Mode.SGLANG, sends_head_early=True)
        # waited for, the decode would be blamed
        front = await start(rig, [broken, good, decode], answer_timeout=20.0)
        asking = asyncio.gather(*(front.events(COMPLETION) for _ in range(2)))  # each prefill gets one
        await until(lambda: bool(decode.requests) and bool(broken.requests))
        broken.gate.set()
        for events in await asking:
            assert joined(events) == "".join(tokens_of(COMPLETION["prompt"], 5))
        blamed = {tracked.id: tracked.breaker.n_failed(time.monotonic()) for tracked in front.app.registry}
        assert [blamed[engine.instance.id] for engine in (broken, good, decode)] == [1, 0, 0]

    run(test)


@pytest.mark.parametrize("garbage", [b"<html>", b"[]", b"7", b'{"meta_info": 7}', b'{"meta_info": null}'])
def test_log_probabilities_that_can_not_be_read_are_another_pairs_to_give(garbage: bytes) -> None:
    async def test(rig: Rig) -> None:
        broken = await rig.engine(Role.PREFILL, Mode.SGLANG, garbage=garbage)
        good = await rig.engine(Role.PREFILL, Mode.SGLANG)
        decode = await rig.engine(Role.DECODE, Mode.SGLANG)
        front = await start(rig, [broken, good, decode])
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
        for _ in range(2):
            status, answer, _ = await front.post(body, "/generate")
            assert status == 200
            own = [[-2.0, 2, None]]
            assert answer["meta_info"]["input_token_logprobs"] in (own, [[-1.0, 1, None], *own])
        broken.garbage, decode.garbage = None, b"{"
        status, answer, _ = await front.post(body, "/generate")
        assert status == 502
        assert "no JSON" in json.dumps(answer)

    run(test)
