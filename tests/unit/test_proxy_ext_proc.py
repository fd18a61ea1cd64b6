"""The router as an endpoint picker: what it answers to an Envoy's ext_proc filter."""

from __future__ import annotations

import json

import pytest

from fake_engines import FakeEngine
from p2pkv.errors import ControlError
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy.app import App
from p2pkv_proxy.ext_proc import ExtProc
from p2pkv_proxy.picking import DESTINATION
from picker import BUFFERED, connect, ended, endpoint, run, told, until_free
from rig import Rig

BODY = json.dumps({"prompt": "a" * 200_000, "max_tokens": 5}).encode()


def test_a_request_that_streams_both_ways_is_picked_for_counted_and_passed_back_whole() -> None:
    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        async with connect(app) as envoy:
            await envoy.ask(headers={DESTINATION: "6.6.6.6:6"})
            for first in range(0, len(BODY), 60_000):
                await envoy.body(BODY[first : first + 60_000], end=first + 60_000 >= len(BODY))
            head = await envoy.hear()
            chosen = told(head.request_headers.response)[DESTINATION]
            assert chosen in [endpoint(engine) for engine in engines]
            assert head.dynamic_metadata["envoy.lb"][DESTINATION] == chosen
            back, is_last = b"", False
            while not is_last:
                streamed = (await envoy.hear()).request_body.response.body_mutation.streamed_response
                assert len(streamed.body) <= 64 * 1024
                back, is_last = back + streamed.body, streamed.end_of_stream
            assert back == BODY
            (busy,) = [tracked for tracked in app.registry if tracked.in_flight]
            assert endpoint(next(e for e in engines if e.instance.id == busy.id)) == chosen
            assert busy.n_tokens > 50_000
            await envoy.respond(200)
            assert (await envoy.hear()).WhichOneof("response") == "response_headers"
            await envoy.response_body(b"data: x\n\n", end=False)
            await envoy.response_body(b"data: [DONE]\n\n", end=True)
            answers = [await envoy.hear(), await envoy.hear()]
            back = b"".join(a.response_body.response.body_mutation.streamed_response.body for a in answers)
            assert back == b"data: x\n\ndata: [DONE]\n\n"
            await until_free(app)
            assert ended(app, "ok") == 1.0
            assert busy.served == 1

    run(test, Role.BOTH, Role.BOTH)


def test_a_buffered_body_is_answered_with_who_was_picked() -> None:
    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        async with connect(app) as envoy:
            await envoy.ask(mode=BUFFERED)
            first = await envoy.hear()
            assert told(first.request_headers.response) == {}
            await envoy.body(BODY, end=True)
            answer = await envoy.hear()
            assert told(answer.request_body.response)[DESTINATION] == endpoint(engines[0])
            assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == endpoint(engines[0])
            assert answer.request_body.response.clear_route_cache
        await until_free(app)  # Envoy has hung up
        assert ended(app, "client_gone") == 1.0

    run(test, Role.BOTH)


def test_a_prefill_is_named_beside_the_decode() -> None:
    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        prefill, decode = engines
        async with connect(app) as envoy:
            await envoy.ask(mode=BUFFERED)
            await envoy.hear()
            await envoy.body(BODY, end=True)
            headers = told((await envoy.hear()).request_body.response)
            assert headers == {DESTINATION: endpoint(decode), "x-prefiller-host-port": endpoint(prefill)}
            assert [tracked.in_flight for tracked in app.registry] == [1, 1]
            await envoy.respond(200, end=True)
            await envoy.hear()
            await until_free(app)

    run(test, Role.PREFILL, Role.DECODE)


def test_a_request_without_a_body_is_picked_for_and_only_among_those_that_envoy_names() -> None:
    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        for engine in engines:
            async with connect(app) as envoy:
                await envoy.ask(path="/v1/models?x=1", method="GET", end=True, subset=[endpoint(engine)])
                assert told((await envoy.hear()).request_headers.response)[DESTINATION] == endpoint(engine)
        async with connect(app) as envoy:
            await envoy.ask(path="/v1/models", method="GET", end=True, subset=["10.9.9.9:1"])
            assert (await envoy.hear()).immediate_response.status.code == 503

    run(test, Role.BOTH, Role.BOTH)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b'{"prompt": {}}', 400), (b"x" * 5000, 413), (None, 408)],
)
def test_what_can_not_be_picked_for_is_answered_at_once(body: bytes | None, status: int) -> None:
    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        async with connect(app) as envoy:
            await envoy.ask()
            if body is not None:
                await envoy.body(body, end=True)
            answer = (await envoy.hear()).immediate_response
            assert answer.status.code == status
            assert json.loads(answer.body)["error"]["code"] == status
        await until_free(app)

    run(test, Role.BOTH, max_body=4000, body_timeout=0.5)


def test_a_port_that_another_process_has_is_said_to_be_taken() -> None:
    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        assert app.ext_proc is not None
        services = app.ext_proc._services
        other = ExtProc(f"127.0.0.1:{app.ext_proc.port}", services)
        with pytest.raises(ControlError, match="cannot listen"):
            await other.start()
        await other.close()

    run(test, Role.BOTH)


def test_an_engine_that_fails_behind_envoy_is_left_alone() -> None:
    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        for _ in range(3):
            async with connect(app) as envoy:
                await envoy.ask(path="/v1/models", method="GET", end=True)
                await envoy.hear()
                await envoy.respond(503, end=True)
                await envoy.hear()
        (tracked,) = app.registry
        assert tracked.breaker.opened == 1
        assert ended(app, "engine_error") == 3.0

    run(test, Role.BOTH)
