"""Clients' connections without a request: they are there for the next one, and make room where there are too many."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from fake_engines import FakeEngine
from front import Front, run, start, until
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy import guarded_http
from p2pkv_proxy.idle_connections import IDLE, KEEP_S, IdleConnections
from rig import Rig

ASK = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, front: Front) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", front.port))

    async def ask(self) -> None:
        """Ask for what is answered at once."""
        self.writer.write(ASK)
        assert (await self._reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await self._reader.readuntil(b"}")

    async def is_ended(self) -> bool:
        """Wait for the connection's end."""
        return await self._reader.read(1) == b""

    @property
    def is_open(self) -> bool:
        return not self._reader.at_eof()


async def bounded(rig: Rig, most: int) -> tuple[Front, FakeEngine, IdleConnections]:
    engine = await rig.engine(Role.BOTH)
    front = await start(rig, [engine])
    idle = IdleConnections(front.app.metrics.ended_idle.inc, most)
    front.listening.server.lifespan.state[IDLE] = idle
    return front, engine, idle


def test_strangers_make_room_before_those_who_have_asked() -> None:
    async def test(rig: Rig) -> None:
        front, _, idle = await bounded(rig, 3)
        kept = [await Client.connect(front) for _ in range(2)]
        for client in kept:
            await client.ask()
        strangers = [await Client.connect(front) for _ in range(5)]
        for stranger in strangers[:-1]:
            assert await stranger.is_ended()
        assert len(idle) == 3
        assert await front.metric("p2pkv_proxy_ended_idle_connections_total") == 4
        for client in kept:
            await client.ask()
        for client in [*kept, *strangers]:
            client.writer.close()

    run(test)


def test_of_those_who_have_asked_the_longest_idle_makes_room() -> None:
    async def test(rig: Rig) -> None:
        front, _, idle = await bounded(rig, 2)
        first, second = [await Client.connect(front) for _ in range(2)]
        await first.ask()
        await second.ask()
        await first.ask()
        third = await Client.connect(front)
        assert await second.is_ended()
        await third.ask()
        assert len(idle) == 2
        await first.ask()
        for client in (first, second, third):
            client.writer.close()
        await until(lambda: len(idle) == 0)

    run(test)


def test_a_connection_with_a_request_never_makes_room() -> None:
    async def test(rig: Rig) -> None:
        front, engine, idle = await bounded(rig, 1)
        engine.gate.clear()
        asking = asyncio.ensure_future(front.post({"prompt": "x", "max_tokens": 2}))
        await until(lambda: front.app._serving.in_flight == 1)  # type: ignore[union-attr]
        assert len(idle) == 0
        clients = [await Client.connect(front) for _ in range(5)]
        assert await clients[0].is_ended()
        engine.gate.set()
        assert (await asking)[0] == 200
        for client in clients:
            client.writer.close()

    run(test)


def test_whoever_does_not_take_its_answer_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_http, "UNSENT_S", 0.3)

    async def test(rig: Rig) -> None:
        front, _, idle = await bounded(rig, 10)
        slow = await Client.connect(front)
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for protocol in list(front.listening.server.server_state.connections):
            protocol.transport.write(b"x" * (8 << 20))  # type: ignore[union-attr]
        slow.writer.write(ASK)
        await until(lambda: len(idle) == 1)
        await until(lambda: len(idle) == 0)
        slow.writer.transport.abort()

    run(test)


def test_whoever_takes_the_end_of_its_answer_late_is_kept() -> None:
    async def test(rig: Rig) -> None:
        front, _, _ = await bounded(rig, 10)
        client = await Client.connect(front)
        await client.ask()
        (protocol,) = front.listening.server.server_state.connections
        protocol.timeout_keep_alive = 0.0  # type: ignore[union-attr]
        protocol.timeout_keep_alive_handler()  # type: ignore[union-attr]
        assert client.is_open
        assert protocol.timeout_keep_alive == KEEP_S  # type: ignore[union-attr]
        await client.ask()
        client.writer.close()

    run(test)


def test_a_connection_that_its_client_resets_leaves_no_timer() -> None:
    async def test(rig: Rig) -> None:
        front, _, idle = await bounded(rig, 10)
        client = await Client.connect(front)
        await client.ask()
        (protocol,) = front.listening.server.server_state.connections
        client.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        client.writer.transport.abort()
        await until(lambda: len(idle) == 0)
        assert protocol.timeout_keep_alive_task is None  # type: ignore[union-attr]

    run(test)
