"""Streams passed on natively: a client gets what the engine says, however that is cut, or is told of its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from front import COMPLETION, run, until
from p2pkv.instances.heartbeat import Heartbeat, Instance, Mode, Role, State, checked
from p2pkv_proxy import probing
from p2pkv_proxy.app import App
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.settings import Settings
from rig import Rig

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(number: int, nbytes: int = 10) -> bytes:
    return b'data: {"choices": [{"text": "%d %b"}]}\n\n' % (number, b"x" * nbytes)


@asynccontextmanager
async def router_before(rig: Rig, speak: Speak, **settings: float) -> AsyncIterator[tuple[App, str]]:
    """Run a router before one engine that answers each request by ``speak``, byte for byte."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                if head.startswith(b"GET "):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                await reader.readexactly(int(length))
                await speak(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    instance = checked(Instance(url=f"http://{host}:{port}", role=Role.BOTH, mode=Mode.VLLM))
    app = App(Plan(settings=Settings(**settings), instances=(instance,)))  # type: ignore[arg-type]
    listening = await rig.router(app)
    await until(lambda: all(tracked.state.value == "ready" for tracked in app.registry))
    try:
        yield app, listening.url
    finally:
        server.close()


async def streamed(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.post(url + "/v1/completions", json=COMPLETION | {"stream": True}) as response:
        return await response.read()


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_is_whole_however_it_is_cut(seed: int) -> None:
    chance = random.Random(seed)
    said = [event(number, chance.choice([0, 10, 3000])) for number in range(40)] + [DONE]
    raw = HEAD + b"".join(map(chunk, said)) + b"0\r\n\r\n"

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = raw
        while left:
            n = chance.choice([1, 2, 5, 100, 1000])
            writer.write(left[:n])
            left = left[n:]
            await asyncio.sleep(0)

    async def test(rig: Rig) -> None:
        async with router_before(rig, speak) as (app, url), aiohttp.ClientSession() as session:
            assert app.relay is not None
            for number in range(1, 4):
                assert await streamed(session, url) == b"".join(said)
                assert app.relay.n_streams == number
            (engine,) = app.registry
            assert engine.served == 3
            assert engine.breaker.n_failed(0.0) == 0

    run(test)


def test_a_stream_waits_less_for_an_engine_whose_health_check_fails() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(event(0)))
        await reader.read()  # says nothing more, until the router has hung up

    async def test(rig: Rig) -> None:
        async with router_before(rig, speak, stalled_after=0.05) as (app, url):
            session = await rig.enter_async_context(aiohttp.ClientSession())
            answer = asyncio.ensure_future(streamed(session, url))
            await until(lambda: app.relay is not None and len(app.relay) == 1)
            (engine,) = app.registry
            await asyncio.sleep(0.3)  # several times what a stream has whose engine fails
            assert not answer.done()
            while not answer.done():
                app.registry.note_probe(engine.id, is_healthy=False)
                await asyncio.sleep(0.01)
            assert b"did not answer in time" in await answer

    run(test)


def test_a_stream_of_who_has_gone_waits_less_if_its_health_check_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probing, "_EVERY_S", 0.02)

    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH)
        app = App(Plan(settings=Settings(stalled_after=0.05), lifetime=0.5))
        listening = await rig.router(app)
        beat = Heartbeat(instance=engine.instance, boot=1, sequence=1, state=State.READY)
        app.registry.note_heartbeat(beat)
        engine.token_gate = asyncio.Semaphore(1)
        session = await rig.enter_async_context(aiohttp.ClientSession())
        answer = asyncio.ensure_future(streamed(session, listening.url))
        await until(lambda: app.relay is not None and len(app.relay) == 1)
        while app.registry.get(engine.instance.id) is not None:
            await asyncio.sleep(0.01)
            app.registry.expire()
        await asyncio.sleep(0.3)
        assert not answer.done()  # it is silent, as all its heartbeats are, and well
        engine.is_healthy = False
        assert b"did not answer in time" in await answer
        assert app.registry.probed == []

    run(test)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (b"", "hung up"),
        (chunk(event(2))[:-8], "hung up"),
        (b"0\r\n\r\n", "ended its answer early"),
        (b"what\r\n", "no HTTP"),
        (chunk(b"x" * (1 << 20) + b"y"), "more than"),
    ],
)
def test_a_stream_that_is_not_whole_says_so_behind_its_last_event(end: bytes, why: str) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(event(0)))
        assert app.relay is not None
        await until(lambda: len(app.relay) == 1)  # type: ignore[arg-type]
        writer.write(chunk(event(1)) + end)
        await writer.drain()
        raise ConnectionError

    async def test(rig: Rig) -> None:
        nonlocal app
        async with router_before(rig, speak) as (app, url), aiohttp.ClientSession() as session:
            raw = await streamed(session, url)
            assert raw.startswith(event(0) + event(1) + b'data: {"error"')
            assert why.encode() in raw
            assert raw.endswith(b"\n\n")
            (engine,) = app.registry
            assert engine.in_flight == 0
            assert len(app.relay) == 0  # type: ignore[arg-type]

    app: App
    run(test)


def test_an_engine_that_falls_silent_behind_its_first_event_is_not_waited_for_long() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(event(0)))
        await reader.read()
        raise ConnectionError

    async def test(rig: Rig) -> None:
        async with (
            router_before(rig, speak, answer_timeout=0.3) as (_, url),
            aiohttp.ClientSession() as session,
        ):
            assert b"did not answer in time" in await streamed(session, url)

    run(test)


def test_a_client_that_leaves_ends_its_stream_at_the_engine() -> None:
    has_ended = asyncio.Event()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(event(0)))
        await reader.read()
        has_ended.set()
        raise ConnectionError

    async def test(rig: Rig) -> None:
        async with router_before(rig, speak) as (app, url), aiohttp.ClientSession() as session:
            asking = asyncio.ensure_future(streamed(session, url))
            await until(lambda: app.relay is not None and len(app.relay) == 1)
            asking.cancel()
            await has_ended.wait()
            await until(lambda: app.relay is not None and len(app.relay) == 0)

    run(test)


def test_an_engine_waits_for_a_client_that_reads_slowly_and_the_client_gets_all() -> None:
    piece = event(7, 60_000)
    n_written = 0

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal n_written
        writer.write(HEAD + chunk(event(0)))
        for _ in range(500):
            writer.write(chunk(piece))
            await writer.drain()
            n_written += 1
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    async def test(rig: Rig) -> None:
        async with (
            router_before(rig, speak) as (app, url),
            aiohttp.ClientSession(read_bufsize=1024) as session,
        ):
            body = COMPLETION | {"stream": True}
            async with session.post(url + "/v1/completions", json=body) as response:
                await until(lambda: app.relay is not None and len(app.relay) == 1)
                before = -1
                while before != n_written:  # until nothing moves any more
                    before = n_written
                    for _ in range(20):  # meanwhile the loop has turned often enough for all that can move
                        async with session.get(url + "/healthz") as answer:
                            await answer.read()
                assert n_written < 400  # of 30 MB; what sockets hold is a part of that
                raw = await response.read()
            assert raw == event(0) + piece * 500 + DONE

    run(test)
