"""Engines with https: answered through as others are, and believed only with a certificate that says who they are."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from certificates import Authority, needs_openssl
from fake_answers import tokens_of
from fake_engines import FakeEngine
from p2pkv.errors import ConfigError
from p2pkv.instances.heartbeat import Role, State
from p2pkv_proxy.app import App
from p2pkv_proxy.connection import ConnectionFailedError
from p2pkv_proxy.connections import Connections
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.settings import Settings
from p2pkv_proxy.tls import Certificate, believed, read_authorities
from rig import Rig

pytestmark = needs_openssl
BODY = {"prompt": "some prompt", "max_tokens": 40}


def run(test: Callable[[Rig], Awaitable[None]]) -> None:
    async def within() -> None:
        async with Rig() as rig:
            await asyncio.wait_for(test(rig), 120.0)

    asyncio.run(within())


async def start(rig: Rig, engines: list[FakeEngine], authorities: Path | None) -> tuple[App, str]:
    instances = tuple(engine.instance for engine in engines)
    app = App(
        Plan(
            settings=Settings(),
            instances=instances,
            engines_ca=read_authorities(authorities) if authorities else None,
        )
    )
    return app, (await rig.router(app)).url


def test_a_pair_with_https_answers_as_one_without(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        authority = Authority(tmp_path, "one")
        tls = Certificate.read(*authority.issue("engine")).context()
        prefill, decode = await rig.engine(Role.PREFILL, tls=tls), await rig.engine(Role.DECODE, tls=tls)
        app, url = await start(rig, [prefill, decode], authority.ca)
        while not all(tracked.state is State.READY for tracked in app.registry):
            await asyncio.sleep(0.005)
        decode.token_gate = asyncio.Semaphore(1)
        raw = b""
        async with aiohttp.ClientSession() as session:
            async with session.post(url + "/v1/completions", json=BODY | {"stream": True}) as answer:
                # a token when the one before is here: meanwhile a stream is passed on natively, if it may be
                while not raw.endswith(b"[DONE]\n\n"):
                    raw += await answer.content.readuntil(b"\n\n")
                    decode.token_gate.release()
            events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event][:-1]
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
            assert text == "".join(tokens_of("some prompt", 40))
            decode.token_gate = asyncio.Semaphore(1000)
            for _ in range(3):  # over connections that were kept
                async with session.post(url + "/v1/completions", json=BODY) as answer:
                    assert (await answer.json())["choices"][0]["text"] == text
            async with session.get(url + "/v1/models") as answer:
                assert answer.status == 200
        assert app.relay is not None
        assert app.relay.n_streams == 0
        assert len(prefill.requests) == len(decode.requests) == 4

    run(test)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("expired", "certificate has expired"),
        ("of another authority", "certificate verify failed"),
        ("of another host", "IP address mismatch"),
        ("none", "TLS"),
    ],
)
def test_an_engine_that_can_not_say_who_it_is_gets_nothing(tmp_path: Path, what: str, said: str) -> None:
    async def test(rig: Rig) -> None:
        authority, stranger = Authority(tmp_path, "one"), Authority(tmp_path, "two")
        issued = {
            "expired": lambda: authority.issue("engine", days=-1),
            "of another authority": lambda: stranger.issue("engine"),
            "of another host": lambda: authority.issue("engine", host="IP:10.9.8.7"),
        }
        tls = Certificate.read(*issued[what]()).context() if what in issued else None
        engine = await rig.engine(Role.BOTH, tls=tls)
        url = engine.instance.url.replace("http://", "https://")
        connections = Connections(
            connect_timeout=10.0, answer_timeout=10.0, tls=believed(read_authorities(authority.ca))
        )
        try:
            with pytest.raises(ConnectionFailedError, match=said):
                await connections.ask(url, b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}")
        finally:
            connections.close()
        assert engine.requests == []

    run(test)


def test_an_engine_that_is_not_believed_fails_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(rig: Rig) -> None:
        authority = Authority(tmp_path, "one")
        engine = await rig.engine(
            Role.BOTH, tls=Certificate.read(*authority.issue("engine", days=-1)).context()
        )
        app, url = await start(rig, [engine], authority.ca)
        while not all(tracked.state is State.FAILING for tracked in app.registry):
            await asyncio.sleep(0.005)
        assert "certificate has expired" in caplog.text
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + "/v1/completions", json=BODY) as answer,
        ):
            assert answer.status == 503
        assert engine.requests == []

    run(test)


def test_an_engine_that_never_finishes_its_handshake_costs_the_time_to_connect(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # connected to, and never served
            tls = believed(read_authorities(Authority(tmp_path, "one").ca))
            connections = Connections(connect_timeout=0.2, answer_timeout=60.0, tls=tls)
            try:
                with pytest.raises(ConnectionFailedError, match="in time"):
                    await connections.get(f"https://127.0.0.1:{silent.getsockname()[1]}")
            finally:
                connections.close()

    run(test)


def test_authorities_that_are_none_are_refused(tmp_path: Path) -> None:
    nonsense = tmp_path / "ca.pem"
    nonsense.write_text("no certificate")
    for path in (nonsense, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="cannot use the authorities"):
            read_authorities(path)
    assert believed(None) is None
    made = believed(read_authorities(Authority(tmp_path, "one").ca))
    assert made is not None
    assert made.verify_mode is ssl.CERT_REQUIRED
