"""An Envoy that says anything in any order: the picker harms nobody else, and nothing stays under way."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc.aio
import pytest

from fake_engines import FakeEngine
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy.app import App
from patience import PATIENCE
from picker import PROCESS, Envoy, connect, run, told, until_free
from rig import Rig


def test_garbage_and_messages_out_of_order_harm_nobody_else() -> None:
    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        assert app.ext_proc is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.ext_proc.port}") as channel:
            raw = channel.stream_stream(PROCESS)

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
        chunk = rng.choice(
            [b"", b"{", b'{"prompt": "' + b"a" * 1000, b'{"prompt": "a", "max_tokens": 2}', b"x" * 5000]
        )
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
