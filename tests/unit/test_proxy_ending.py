"""The router is told to end: requests under way have their time, then their clients are told that it is over."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import aiohttp
import pytest

from front import COMPLETION, run, start, until
from p2pkv.instances.heartbeat import Mode, Role
from rig import Rig

STREAM = COMPLETION | {"max_tokens": 20, "stream": True}


async def start_process(
    rig: Rig, engine: str, drain_timeout: float
) -> tuple[asyncio.subprocess.Process, str]:
    """Start the router as its users do; return its process and URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from p2pkv_proxy.cli import main; main()"),
        *("--listen", "127.0.0.1:0", "--heartbeats", "", "--both", engine),
        *("--drain-timeout", str(drain_timeout)),
        stdout=asyncio.subprocess.PIPE,
    )
    rig.callback(lambda: process.returncode is None and process.kill())
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    url = line.split()[-1]
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(url + "/healthz") as response:
                if response.status == 200:
                    return process, url
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("in_time", [True, False])
def test_at_sigterm_a_stream_ends_in_its_time_or_says_that_it_broke_off(*, in_time: bool) -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH, token_gate=asyncio.Semaphore(1))
        process, url = await start_process(rig, engine.instance.url, 60.0 if in_time else 0.2)
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + "/v1/completions", json=STREAM) as answer,
        ):
            raw = await answer.content.readuntil(b"\n\n")
            process.send_signal(signal.SIGTERM)
            if in_time:
                for _ in range(20):
                    engine.token_gate.release()
            raw += await answer.content.read()
        events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
        if in_time:
            assert events[-1] == b"[DONE]"
            assert len(events) > 20
        else:
            assert "the router ends" in json.loads(events[-1])["error"]["message"]
            assert b"[DONE]" not in events
        assert await process.wait() == -signal.SIGTERM  # uvicorn hands it on when all is done

    run(test)


def test_at_sigterm_a_request_without_an_answer_is_refused_when_its_time_is_over() -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH, gate=asyncio.Event())
        process, url = await start_process(rig, engine.instance.url, 0.2)
        async with aiohttp.ClientSession() as session:
            asking = asyncio.ensure_future(session.post(url + "/v1/completions", json=COMPLETION))
            while not engine.requests:
                await asyncio.sleep(0.005)
            process.send_signal(signal.SIGTERM)
            async with await asking as answer:
                assert answer.status == 503
                assert "the router ends" in (await answer.json())["error"]["message"]
        assert await process.wait() == -signal.SIGTERM  # uvicorn hands it on when all is done

    run(test)


def test_what_ends_requests_comes_too_late_for_an_answer_that_is_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The router still waits for the end of the prefill's part then; there is nothing left to tell the client."""

    async def test(rig: Rig) -> None:
        prefill = await rig.engine(Role.PREFILL, Mode.SGLANG, token_gate=asyncio.Semaphore(0))
        decode = await rig.engine(Role.DECODE, Mode.SGLANG)
        front = await start(rig, [prefill, decode])
        heard, ended = bytearray(), asyncio.Event()

        class Client(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                heard.extend(data)
                if heard.endswith(b"0\r\n\r\n"):
                    front.app.end_requests()  # in the same turn of the loop as the answer's last bytes
                    ended.set()

        transport, _ = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", front.port)
        body = json.dumps(STREAM).encode()
        transport.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await ended.wait()
        await until(lambda: all(tracked.in_flight == 0 for tracked in front.app.registry))
        assert b"[DONE]" in heard
        assert await front.metric("p2pkv_proxy_requests_total", outcome="ok") == 1
        transport.abort()

    run(test)
    assert "ASGI" not in caplog.text
