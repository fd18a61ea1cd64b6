"""A router before fake engines, and a client of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from fake_engines import FakeEngine
from listening import Listening
from p2pkv_proxy.app import App
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.settings import Settings
from rig import Rig

SECONDS = 120.0
COMPLETION = {"prompt": "some prompt", "max_tokens": 5}


class Front:
    """The router and a client of it."""

    def __init__(self, listening: Listening, app: App, session: aiohttp.ClientSession) -> None:
        self.listening = listening
        self.url = listening.url
        self.port = listening.port
        self.app = app
        self.session = session

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, Any, Any]:
        """Return status, body as JSON, and headers."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def text(self, body: dict[str, Any]) -> str:
        """Return the text of an answer that must be good."""
        status, answer, _ = await self.post(body)
        assert status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text

    async def events(self, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
        """Return the events of a stream, the last one being the string that ends it."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as response:
            raw = await response.read()
            assert response.status == 200, raw
        events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
        return [json.loads(event) if event != b"[DONE]" else "[DONE]" for event in events]

    async def metric(self, name: str, **labels: str) -> float:
        return self.app.metrics.registry.get_sample_value(name, labels) or 0.0


async def start(rig: Rig, engines: list[FakeEngine], **settings: Any) -> Front:
    plan = Plan(
        settings=Settings(**settings),
        instances=tuple(engine.instance for engine in engines),
        prefill_policy="round_robin",
        decode_policy="round_robin",
    )
    app = App(plan)
    listening = await rig.router(app)
    session = await rig.enter_async_context(aiohttp.ClientSession())
    front = Front(listening, app, session)
    await until(lambda: all(t.state.value == "ready" for t in app.registry))
    return front


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what must come; the test's time is the limit."""
    while not holds():
        await asyncio.sleep(0.005)


def run(test: Callable[[Rig], Awaitable[None]]) -> None:
    async def within() -> None:
        async with Rig() as rig:
            await asyncio.wait_for(test(rig), SECONDS)

    asyncio.run(within())


def joined(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if "choices" in event)
