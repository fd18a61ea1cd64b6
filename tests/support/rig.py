"""Engines and a router before them, all on the loop of one test."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack
from typing import Any

from fake_engines import FakeEngine
from listening import Listening
from p2pkv.instances.heartbeat import Mode, Role
from p2pkv_proxy.guarded_http import GuardedProtocol
from p2pkv_proxy.idle_connections import KEEP_S


class Rig(AsyncExitStack):
    """Engines and a router before them, all on this loop."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms: dict[int, asyncio.Event] = {}

    async def engine(
        self, role: Role, mode: Mode = Mode.VLLM, *, tls: ssl.SSLContext | None = None, **attributes: Any
    ) -> FakeEngine:
        """Start one more."""
        engine = FakeEngine(role, mode, self.rooms, tls)
        for name, value in attributes.items():
            assert hasattr(engine, name)
            setattr(engine, name, value)
        await self.enter_async_context(engine)
        return engine

    async def router(self, app: Any, *, tls: ssl.SSLContext | None = None) -> Listening:
        """Serve a router's application as its own server does."""
        return await self.serve(app, http=GuardedProtocol, lifespan="on", timeout_keep_alive=KEEP_S, tls=tls)

    async def serve(self, app: Any, **options: Any) -> Listening:
        """Serve an ASGI application."""
        return await self.enter_async_context(Listening(app, **options))
