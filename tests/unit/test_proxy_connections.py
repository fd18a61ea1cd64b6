"""The router's connections to engines, before servers that say what a test tells them to, byte for byte."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from p2pkv_proxy.connection import ConnectionFailedError, HungUpError, ShortageError
from p2pkv_proxy.connections import Connections

if TYPE_CHECKING:
    from typing_extensions import Self

SECONDS = 120.0
ASKED = b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\n"

Run = Callable[[Coroutine[object, object, None]], None]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test on either loop: their transports differ."""
    if request.param == "asyncio":
        return lambda work: asyncio.run(asyncio.wait_for(work, SECONDS))
    uvloop = pytest.importorskip("uvloop")
    if sys.version_info >= (3, 11):

        def run(work: Coroutine[object, object, None]) -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(asyncio.wait_for(work, SECONDS))

        return run
    pytest.skip("asyncio.Runner came with Python 3.11")


class Server:
    """Answers each request with the next of ``answers``; counts connections and how they end."""

    def __init__(self, *answers: Serve) -> None:
        self._answers = iter(answers)
        self.n_connections = 0
        self.ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname()[:2])
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await next(self._answers)(reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.set()
        finally:
            writer.close()


def says(*pieces: bytes, end: bool = False) -> Serve:
    """Return an answer in pieces that arrive one by one; ``end`` closes the connection behind them."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        if end:
            writer.close()

    return answer


async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Wait until the other side has gone."""
    await reader.read()
    raise ConnectionError


def connections(*, answer_timeout: float = SECONDS) -> Connections:
    return Connections(connect_timeout=SECONDS, answer_timeout=answer_timeout)


async def ask(pool: Connections, address: str) -> tuple[int, bytes]:
    """Send a request; return status and body."""
    connection = await pool.get(address)
    try:
        connection.send(ASKED)
        status = await connection.head()
        return status, await connection.read(1 << 30)
    finally:
        connection.done()


CHUNKED = (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"3\r\nab", b"c\r\n2\r\nde\r", b"\n0\r\n\r\n")
WAYS = {
    "with a length": says(HEAD + b"content-le", b"ngth: 5\r\n\r\nab", b"cde"),
    "in chunks": says(*CHUNKED),
    "until the end of the connection": says(HEAD + b"\r\nab", b"cde", end=True),
    "behind a 1xx": says(
        b"HTTP/1.1 102 Processing\r\nx: y\r\n\r\n", HEAD + b"content-length: 5\r\n\r\nabcde"
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_is_whole_however_it_comes(run: Run, way: str) -> None:
    async def scenario() -> None:
        async with Server(WAYS[way]) as server:
            pool = connections()
            assert await ask(pool, server.address) == (200, b"abcde")
            pool.close()

    run(scenario())


def test_a_connection_is_used_again_unless_it_must_not_be(run: Run) -> None:
    good = says(HEAD + b"content-length: 2\r\n\r\nok")
    last = says(HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\nok")

    async def scenario() -> None:
        async with Server(good, good, last, good) as server:
            pool = connections()
            for n_connections in (1, 1, 1, 2):
                assert await ask(pool, server.address) == (200, b"ok")
                assert server.n_connections == n_connections
            pool.close()

    run(scenario())


def test_an_answer_that_nobody_reads_to_its_end_ends_the_connection(run: Run) -> None:
    async def begins(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED[0] + CHUNKED[1])
        await nothing(reader, writer)

    async def scenario() -> None:
        async with Server(begins) as server:
            pool = connections()
            connection = await pool.get(server.address)
            connection.send(ASKED)
            assert await connection.head() == 200
            connection.done()
            await server.ended.wait()
            pool.close()

    run(scenario())


BAD = {
    "no HTTP": (says(b"SSH-2.0-x\r\n\r\n"), "no HTTP"),
    "cut off": (says(HEAD + b"content-length: 5\r\n\r\nab", end=True), "hung up"),
    "cut off in a chunk": (says(*CHUNKED[:2], end=True), "hung up"),
    "headers without end": (says(HEAD, *[b"x: " + b"y" * 9000 + b"\r\n"] * 9), "bytes of headers"),
    "silence": (nothing, "did not answer in time"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_answer_is_an_error_that_says_why(run: Run, how: str) -> None:
    answer, why = BAD[how]

    async def scenario() -> None:
        async with Server(answer) as server:
            pool = connections(answer_timeout=0.3 if how == "silence" else SECONDS)
            with pytest.raises(ConnectionFailedError, match=why):
                await ask(pool, server.address)
            pool.close()

    run(scenario())


@pytest.mark.parametrize("when", ["at once", "later"])
def test_what_came_unasked_is_not_taken_for_the_next_answer(run: Run, when: str) -> None:
    """An engine that answers twice must not have the second answer go to somebody else."""
    first, second = HEAD + b"content-length: 1\r\n\r\na", HEAD + b"content-length: 5\r\n\r\nwrong"
    twice = says(first + second) if when == "at once" else says(first, second)
    good = says(HEAD + b"content-length: 2\r\n\r\nok")

    async def scenario() -> None:
        async with Server(twice, good) as server:
            pool = connections()
            assert await ask(pool, server.address) == (200, b"a")
            await server.ended.wait()
            assert await ask(pool, server.address) == (200, b"ok")
            assert server.n_connections == 2
            pool.close()

    run(scenario())


def test_an_engine_waits_for_a_reader_that_is_slow(run: Run) -> None:
    n_bytes = 64 << 20
    is_written = []

    async def much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % n_bytes)
        for _ in range(n_bytes >> 20):
            writer.write(bytes(1 << 20))
            await writer.drain()
            is_written.append(1)

    async def scenario() -> None:
        async with Server(much, much) as server:
            pool = connections()
            connection = await pool.get(server.address)
            connection.send(ASKED)
            assert await connection.head() == 200
            # the engine is as far as it gets: another one has an answer in the meantime
            async with Server(says(HEAD + b"content-length: 2\r\n\r\nok")) as other:
                assert await ask(pool, other.address) == (200, b"ok")
            assert len(is_written) < n_bytes >> 20
            assert len(await connection.read(2 * n_bytes)) == n_bytes
            connection.done()
            pool.close()

    run(scenario())


def test_nobody_there_is_an_error(run: Run) -> None:
    async def scenario() -> None:
        async with Server() as server:
            address = server.address
        pool = connections()
        with pytest.raises(ConnectionFailedError, match="can't be reached"):
            await ask(pool, address)
        pool.close()

    run(scenario())


def closes_behind(answer: bytes) -> Serve:
    """Return an answer behind which the engine hangs up as soon as it is asked again, which it does not answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        raise ConnectionError

    return serve


def test_a_kept_connection_that_the_engine_has_closed_costs_no_request(run: Run) -> None:
    async def scenario() -> None:
        good = HEAD + b"content-length: 2\r\n\r\nok"
        async with Server(closes_behind(good), says(good)) as server:
            pool = connections()
            for _ in range(2):
                connection, status = await pool.ask(server.address, ASKED)
                assert (status, await connection.read(2)) == (200, b"ok")
                assert await connection.part() == b""
                connection.done()
            assert server.n_connections == 2
            pool.close()

    run(scenario())


def test_a_new_connection_that_the_engine_closes_is_its_failure(run: Run) -> None:
    async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        raise ConnectionError

    async def scenario() -> None:
        async with Server(hangs_up, hangs_up) as server:
            pool = connections()
            with pytest.raises(ConnectionFailedError, match="hung up"):
                await pool.ask(server.address, ASKED)
            assert server.n_connections == 1
            pool.close()

    run(scenario())


@pytest.mark.parametrize("host", ["p0..svc", "x" * 64 + ".svc"])
def test_a_host_that_can_be_none_is_an_error_that_says_so(run: Run, host: str) -> None:
    async def scenario() -> None:
        pool = connections()
        with pytest.raises(ConnectionFailedError, match=r"can't be reached, .* is no name of a host"):
            await pool.ask(f"{host}:8000", ASKED)
        pool.close()

    run(scenario())


def test_a_shortage_here_is_not_the_engines_fault(run: Run) -> None:
    async def scenario() -> None:
        async with Server(says(HEAD + b"content-length: 0\r\n\r\n")) as server:
            pool = connections()
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            taken = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            try:
                with suppress(OSError):
                    while True:
                        taken.append(os.open(os.devnull, os.O_RDONLY))
                with pytest.raises(ShortageError, match="the router is short: Too many open files"):
                    await pool.ask(server.address, ASKED)
            finally:
                for descriptor in taken:
                    os.close(descriptor)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            connection, status = await pool.ask(server.address, ASKED)
            assert status == 200
            connection.done()
            pool.close()

    run(scenario())


def test_a_listener_that_dies_fails_those_who_have_just_connected_and_nobody_else(run: Run) -> None:
    """It ends what it has not accepted, at whatever turn of the loop they are."""

    async def test() -> None:
        for n_turns in range(8):
            listener = socket.create_server(("127.0.0.1", 0), backlog=512)
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            connections = Connections(connect_timeout=10.0, answer_timeout=10.0)
            asking = [asyncio.ensure_future(connections.ask(address, ASKED)) for _ in range(50)]
            for _ in range(n_turns):
                await asyncio.sleep(0)
            listener.close()
            found = await asyncio.gather(*asking, return_exceptions=True)
            connections.close()
            assert {type(one) for one in found} <= {ConnectionFailedError, HungUpError}

    run(test())
