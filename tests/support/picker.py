"""A picker before fake engines, and an Envoy that asks it, message by message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc.aio

from fake_engines import FakeEngine
from p2pkv.instances.heartbeat import Mode, Role
from p2pkv_proxy.app import App
from p2pkv_proxy.ext_proc_messages import METHOD, SERVICE, ProcessingRequest, ProcessingResponse
from p2pkv_proxy.picking import DESTINATION
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.settings import Settings
from p2pkv_proxy.tls import Certificate
from patience import PATIENCE
from rig import Rig

if TYPE_CHECKING:
    from typing_extensions import Self

PROCESS = f"/{SERVICE}/{METHOD}"
BUFFERED, DUPLEX = 2, 4
"""How Envoy sends bodies."""


class Envoy:
    """One request, as Envoy's filter tells of it."""

    def __init__(self, port: int, authorities: bytes | None = None) -> None:
        """``authorities``: whose certificates are believed, in PEM; None: without TLS."""
        address = f"127.0.0.1:{port}"
        if authorities is None:
            self._channel = grpc.aio.insecure_channel(address)
        else:
            self._channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authorities))
        self.call = self._channel.stream_stream(
            PROCESS,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()

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
        request = ProcessingRequest()
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
        request = ProcessingRequest()
        request.request_body.body, request.request_body.end_of_stream = chunk, end
        await self.call.write(request)

    async def respond(self, status: int, *, end: bool = False) -> None:
        request = ProcessingRequest()
        request.response_headers.headers.headers.add(key=":status", raw_value=str(status).encode())
        request.response_headers.end_of_stream = end
        await self.call.write(request)

    async def response_body(self, chunk: bytes, *, end: bool) -> None:
        request = ProcessingRequest()
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


def run(
    test: Test,
    *roles: Role,
    mode: Mode = Mode.VLLM,
    certificate: Certificate | None = None,
    **settings: Any,
) -> None:
    """Run a picker before engines of these roles, and the test."""

    async def wrapped() -> None:
        async with Rig() as rig:
            engines = [await rig.engine(role, mode) for role in roles]
            plan = Plan(
                settings=Settings(**settings),
                instances=tuple(engine.instance for engine in engines),
                ext_proc="127.0.0.1:0",
                prefill_policy="least_loaded",
                certificate=certificate,
            )
            app = App(plan)
            await rig.router(app)
            until = time.monotonic() + 20 * PATIENCE
            while not all(tracked.state.value == "ready" for tracked in app.registry):
                assert time.monotonic() < until
                await asyncio.sleep(0.01)
            await test(rig, app, engines)

    asyncio.run(wrapped())


def connect(app: App, authorities: bytes | None = None) -> Envoy:
    assert app.ext_proc is not None
    return Envoy(app.ext_proc.port, authorities)


async def until_free(app: App) -> None:
    limit = time.monotonic() + 10 * PATIENCE
    while any(tracked.in_flight for tracked in app.registry):
        assert time.monotonic() < limit
        await asyncio.sleep(0.01)


def ended(app: App, outcome: str) -> float:
    return app.metrics.registry.get_sample_value("p2pkv_proxy_requests_total", {"outcome": outcome}) or 0.0
