"""Endpoints that the router takes no part in: one instance gets what the client has sent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from front import Front, run, start, until
from p2pkv.instances.heartbeat import Mode, Role
from rig import Rig


async def ask(
    front: Front, method: str, path: str, data: bytes = b"", **headers: str
) -> tuple[int, str, Any]:
    """Return status, content type and body."""
    async with front.session.request(method, front.url + path, data=data or None, headers=headers) as answer:
        raw = await answer.read()
        kind = answer.headers.get("content-type", "")
        return answer.status, kind, json.loads(raw) if raw[:1] == b"{" else raw


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/tokenize", "/score", "/v1/rerank"])
def test_what_is_passed_on_arrives_as_it_was_sent(path: str) -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await rig.engine(Role.BOTH)])
        data = b'{"model":  "", "input": ["a", "b"]}'
        found = await ask(front, "POST", path + "?a=%0d%0ab", data, **{"content-type": "application/json"})
        told = {"path": path + "?a=%0D%0Ab", "kind": "application/json", "body": data.decode()}
        assert found[:2] == (201, "application/x-own")
        assert {**found[2], "path": found[2]["path"].replace("%0d%0a", "%0D%0A")} == told

    run(test)


def test_what_only_routers_may_say_is_left_out() -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH)
        front = await start(rig, [engine])
        body = {"input": "a", "kv_transfer_params": {"remote_host": "evil"}, "bootstrap_room": 1}
        await ask(front, "POST", "/v1/responses", json.dumps(body).encode())
        assert json.loads(engine.passed[0][1]) == {"input": "a"}

    run(test)


def test_unknown_paths_are_passed_on_only_if_that_is_wanted() -> None:
    async def test(rig: Rig) -> None:
        for is_wanted in (False, True):
            engine = await rig.engine(Role.BOTH)
            front = await start(rig, [engine], pass_unknown=is_wanted)
            status, _, _ = await ask(front, "POST", "/v1/load_lora_adapter", b"not json")
            assert status == (201 if is_wanted else 404)
            assert len(engine.passed) == is_wanted
            assert (await ask(front, "GET", "/get_server_info"))[0] == (200 if is_wanted else 404)
            assert ("/get_server_info", "") in engine.asked or not is_wanted
            assert (await ask(front, "DELETE", "/files/1"))[0] in (404, 405)
            # the router's own pages stay its own
            assert (await ask(front, "GET", "/healthz"))[2]["ready"]

    run(test)


def test_what_may_change_something_is_asked_for_once() -> None:
    async def test(rig: Rig) -> None:
        engines = [await rig.engine(Role.BOTH, refusal=(500, b"{}")) for _ in range(3)]
        front = await start(rig, engines, pass_unknown=True)
        assert (await ask(front, "POST", "/flush_cache"))[0] == 500
        assert await front.metric("p2pkv_proxy_retries_total") == 0
        assert (await ask(front, "POST", "/tokenize"))[0] == 500
        assert await front.metric("p2pkv_proxy_retries_total") == 2

    run(test)


def test_sglangs_pairs_get_nothing_that_they_can_not_do_alone() -> None:
    async def test(rig: Rig) -> None:
        pair = [await rig.engine(Role.PREFILL, Mode.SGLANG), await rig.engine(Role.DECODE, Mode.SGLANG)]
        front = await start(rig, pair)
        assert (await ask(front, "POST", "/v1/responses", b"{}"))[0] == 503
        assert (await ask(front, "POST", "/tokenize", b"{}"))[0] == 201
        assert [engine.crashed for engine in pair] == ["", ""]

    run(test)


def test_an_answer_that_breaks_off_is_not_taken_for_whole() -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await rig.engine(Role.BOTH, breaks=lambda: "cut")])
        with pytest.raises(aiohttp.ClientPayloadError):
            await ask(front, "POST", "/v1/embeddings", b"{}")
        assert await front.metric("p2pkv_proxy_requests_total", outcome="broken_off") == 1

    run(test)


def test_limits_hold_for_what_is_passed_on() -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH, gate=asyncio.Event())
        front = await start(rig, [engine], max_body=100, request_timeout=0.5, answer_timeout=0.3)
        assert (await ask(front, "POST", "/v1/embeddings", b"x" * 101))[0] == 413
        assert (await ask(front, "POST", "/v1/embeddings", b"{}"))[0] == 504
        await until(lambda: not any(tracked.in_flight for tracked in front.app.registry))

    run(test)
