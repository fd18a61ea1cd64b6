"""Envoy speaks TLS to the picker, where the router has a certificate."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path

import grpc
import pytest

from certificates import Authority, needs_openssl
from fake_engines import FakeEngine
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy.app import App
from p2pkv_proxy.picking import DESTINATION
from p2pkv_proxy.tls import Certificate
from picker import BUFFERED, Envoy, connect, endpoint, run, told
from rig import Rig

pytestmark = needs_openssl
BODY = json.dumps({"prompt": "a", "max_tokens": 5}).encode()


async def picked(envoy: Envoy) -> str:
    """Ask for one request, and return where it is to go."""
    await envoy.ask(mode=BUFFERED)
    await envoy.hear()
    await envoy.body(BODY, end=True)
    return told((await envoy.hear()).request_body.response)[DESTINATION]


def test_envoy_is_answered_by_tls_and_by_nothing_else(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")

    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        async with connect(app, ours.ca.read_bytes()) as envoy:
            assert await picked(envoy) == endpoint(engines[0])
        for believed in (None, others.ca.read_bytes()):
            async with connect(app, believed) as stranger:
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await picked(stranger)
                assert failure.value.code() is grpc.StatusCode.UNAVAILABLE

    run(test, Role.BOTH, certificate=Certificate.read(*ours.issue("picker")))


def test_another_certificate_is_for_connections_from_then_on(tmp_path: Path) -> None:
    before, after = Authority(tmp_path, "before"), Authority(tmp_path, "after")

    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        assert app.certificate is not None
        assert app.ext_proc is not None
        async with connect(app, before.ca.read_bytes()) as begun:
            await begun.ask(mode=BUFFERED)
            await begun.hear()
            app.certificate.serve(Certificate.read(*after.issue("after")))
            async with connect(app, after.ca.read_bytes()) as envoy:
                assert await picked(envoy) == endpoint(engines[0])
            with pytest.raises(ssl.SSLCertVerificationError):
                await asyncio.open_connection(
                    "127.0.0.1", app.ext_proc.port, ssl=ssl.create_default_context(cafile=before.ca)
                )
            await begun.body(BODY, end=True)
            assert told((await begun.hear()).request_body.response)[DESTINATION] == endpoint(engines[0])

    run(test, Role.BOTH, certificate=Certificate.read(*before.issue("before")))
