"""TLS at the router: the same answers as without, the same bounds, and certificates that change while it serves."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import aiohttp
import pytest

from certificates import Authority, needs_openssl
from fake_answers import tokens_of
from fake_engines import FakeEngine
from listening import Listening
from p2pkv.errors import ConfigError
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy.app import App
from p2pkv_proxy.plan import Files, Plan
from p2pkv_proxy.reloading import loaded
from p2pkv_proxy.settings import Settings
from p2pkv_proxy.tls import Certificate
from rig import Rig

pytestmark = needs_openssl
BODY = {"prompt": "some prompt", "max_tokens": 40}
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
SECONDS = 120.0


class Front:
    """A router with a certificate, and who believes that one."""

    def __init__(self, app: App, listening: Listening, authority: Authority) -> None:
        self.app = app
        self.url, self.port = listening.url, listening.port
        self.trust = ssl.create_default_context(cafile=str(authority.ca))

    async def post(self, body: dict[str, object]) -> bytes:
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + "/v1/completions", json=body, ssl=self.trust) as answer,
        ):
            assert answer.status == 200
            return await answer.read()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1024, ssl=self.trust)

    def count(self, outcome: str) -> float | None:
        return self.app.metrics.registry.get_sample_value("p2pkv_proxy_requests_total", {"outcome": outcome})


async def start(rig: Rig, folder: Path, **settings: float) -> tuple[Front, FakeEngine]:
    authority = Authority(folder, "one")
    chain, key = authority.issue("router")
    engine = await rig.engine(Role.BOTH)
    settled = Settings(**settings)  # type: ignore[arg-type]
    files = Files(tls_cert=chain, tls_key=key)
    app = App(loaded(Plan(settings=settled, instances=(engine.instance,), files=files)))
    assert app.certificate is not None
    listening = await rig.router(app, tls=app.certificate.context)
    while not all(tracked.state.value == "ready" for tracked in app.registry):
        await asyncio.sleep(0.005)
    return Front(app, listening, authority), engine


def test_answers_are_the_same_and_nothing_goes_past_the_encryption(tmp_path: Path) -> None:
    async def test() -> None:
        async with Rig() as rig:
            front, engine = await start(rig, tmp_path)
            engine.token_gate = asyncio.Semaphore(1)
            raw = b""
            async with (
                aiohttp.ClientSession() as session,
                session.post(
                    front.url + "/v1/completions", json=BODY | {"stream": True}, ssl=front.trust
                ) as answer,
            ):
                # a token when the one before is here: meanwhile a stream is passed on natively, if it may be
                while not raw.endswith(b"[DONE]\n\n"):
                    raw += await answer.content.readuntil(b"\n\n")
                    engine.token_gate.release()
            events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
            assert events[-1] == b"[DONE]"
            texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
            assert "".join(texts) == "".join(tokens_of("some prompt", 40))
            whole = json.loads(await front.post(BODY))
            assert whole["choices"][0]["text"] == "".join(texts)
            assert front.app.relay is not None
            assert front.app.relay.n_streams == 0  # natively passed on it would go out as it is

    asyncio.run(asyncio.wait_for(test(), SECONDS))


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_never_reads_is_dropped_and_its_engine_freed(tmp_path: Path, is_stream: bool) -> None:
    async def test() -> None:
        async with Rig() as rig:
            front, _ = await start(rig, tmp_path, client_timeout=0.3)
            _, writer = await front.connect()
            body = json.dumps(
                BODY | {"stream": is_stream, "max_tokens": 1_000_000 if not is_stream else 200_000}
            ).encode()
            writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            while front.count("client_gone") != 1:
                await asyncio.sleep(0.01)
            assert all(tracked.in_flight == 0 for tracked in front.app.registry)
            writer.transport.abort()

    asyncio.run(asyncio.wait_for(test(), SECONDS))


def test_oversized_headers_and_those_who_speak_no_tls_harm_nobody(tmp_path: Path) -> None:
    async def test() -> None:
        async with Rig() as rig:
            front, engine = await start(rig, tmp_path)
            reader, writer = await front.connect()
            writer.write(POST + b"x-long: " + b"x" * (80 << 10))
            assert (await reader.readline()).startswith(b"HTTP/1.1 431")
            writer.transport.abort()
            for said in (POST + b"\r\n", b"\x16\x03\x01\xff\xff" + b"x" * 70_000, b""):
                plain, writer = await asyncio.open_connection("127.0.0.1", front.port)
                writer.write(said)
                if said:
                    assert not (await plain.read()).startswith(b"HTTP")
                writer.transport.abort()
            assert engine.requests == []
            await front.post(BODY)

    asyncio.run(asyncio.wait_for(test(), SECONDS))


def test_a_certificate_changes_while_streams_run_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with Rig() as rig:
            front, engine = await start(rig, tmp_path)
            engine.gate.clear()
            under_way = asyncio.ensure_future(front.post(BODY | {"stream": True}))
            while not engine.requests:
                await asyncio.sleep(0.005)
            (tmp_path / "router.key").write_text("no key")
            with caplog.at_level(logging.WARNING):
                front.app.reload()
            assert "what it said before stays in force" in caplog.text
            _, writer = await front.connect()
            writer.transport.abort()
            other = Authority(tmp_path, "two")
            for made, kept in zip(other.issue("other"), ("router.pem", "router.key"), strict=True):
                shutil.copy(made, tmp_path / kept)
            front.app.reload()
            with pytest.raises(ssl.SSLCertVerificationError):
                await front.connect()
            front.trust = ssl.create_default_context(cafile=str(other.ca))
            _, writer = await front.connect()
            writer.transport.abort()
            engine.gate.set()
            assert (await under_way).endswith(b"[DONE]\n\n")

    asyncio.run(asyncio.wait_for(test(), SECONDS))


def test_what_is_no_pair_is_refused_with_the_reason(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "one")
    chain, key = authority.issue("a")
    _, others_key = authority.issue("b")
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", str(key), "-out", str(locked), "-aes256", "-passout", "pass:secret"]
    subprocess.run(command, check=True, capture_output=True)
    assert Certificate.read(chain, key) == Certificate(chain.read_bytes(), key.read_bytes())
    for pair, said in (
        ((chain, others_key), "cannot use the certificate"),
        ((chain, locked), "without a password"),
        ((key, key), "cannot use the certificate"),
        ((tmp_path / "none", key), "No such file"),
    ):
        with pytest.raises(ConfigError, match=said):
            Certificate.read(*pair)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_the_command_serves_https(tmp_path: Path, n_workers: int) -> None:
    authority = Authority(tmp_path, "one")
    chain, key = authority.issue("router")
    command = [sys.executable, "-c", "from p2pkv_proxy.cli import main; main()", "--listen", "127.0.0.1:0"]
    command += [
        "--heartbeats",
        "",
        "--tls-cert",
        str(chain),
        "--tls-key",
        str(key),
        "--workers",
        str(n_workers),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("p2pkv-proxy listens on https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(authority.ca))
        url = said.split()[3] + "/instances"
        with urllib.request.urlopen(url, context=trust, timeout=SECONDS) as page:  # noqa: S310 - the router's own
            assert json.load(page) == []
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
