"""Streams whose decode fails in the middle: another instance goes on, and the client sees one answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from fake_answers import ids_of, prompt_ids, tokens_of
from fake_engines import FakeEngine
from front import Front, run, start
from p2pkv.instances.heartbeat import Mode, Role
from p2pkv_proxy.continuation import Resume
from rig import Rig

N = 12
PROMPT = "a prompt"
MESSAGES = [{"role": "user", "content": "hello"}]
GREEDY = {"max_tokens": N, "temperature": 0, "stream": True}
COMPLETION = GREEDY | {"prompt": PROMPT}
CHAT = GREEDY | {"messages": MESSAGES}
PATHS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


async def events_of(front: Front, body: dict[str, Any]) -> list[Any]:
    path = next(path for name, path in PATHS.items() if name in body)
    return await front.events(body, path)


def text_of(events: list[Any]) -> str:
    choices = [event["choices"][0] for event in events if isinstance(event, dict) and event.get("choices")]
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)


async def outcomes(front: Front) -> dict[str, int]:
    names = ("resumed", "completed", "failed", "unsuited")
    return {
        name: int(n)
        for name in names
        if (n := await front.metric("p2pkv_proxy_resumed_streams_total", outcome=name))
    }


async def broken(rig: Rig, after: int, how: str = "cut", mode: Mode = Mode.VLLM) -> FakeEngine:
    """An engine whose first stream breaks off before its event ``after``; the others are good."""
    engine = await rig.engine(Role.BOTH, mode)
    left = [after]

    def breaks() -> str:
        left[0] -= 1
        return how if left[0] == -1 else ""

    engine.breaks = breaks
    return engine


@pytest.mark.parametrize("how", ["cut", "error"])
@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_another_instance_goes_on_and_the_client_sees_one_answer(body: dict[str, Any], how: str) -> None:
    async def test(rig: Rig) -> None:
        engines = [await broken(rig, 5, how), await broken(rig, 5, how)]
        front = await start(rig, engines)
        events = await events_of(front, body | {"stream_options": {"include_usage": True}})
        assert events[-1] == "[DONE]"
        prompt = body.get("prompt", MESSAGES)
        assert text_of(events) == "".join(tokens_of(prompt, N))
        assert len({(event["id"], event["object"]) for event in events[:-1]}) == 1
        assert events[-2]["usage"] == {
            "prompt_tokens": len(prompt_ids(prompt)),
            "completion_tokens": N,
            "total_tokens": len(prompt_ids(prompt)) + N,
        }
        assert not [event for event in events[:-1] if "token_ids" in json.dumps(event)]
        asked = [one for engine in engines for one in engine.requests if one["max_tokens"] < N]
        # each breaks off once, behind the fifth event of its own
        assert sorted(one["max_tokens"] for one in asked) == [N - 10, N - 5]
        assert prompt_ids(prompt) + ids_of(prompt, 5) in [one["prompt"] for one in asked]
        assert [engine.crashed for engine in engines] == ["", ""]

    run(test)


def test_who_asks_for_tokens_gets_each_of_them_once() -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await broken(rig, 4), await rig.engine(Role.BOTH)])
        for _ in range(2):  # either is asked first
            events = await events_of(front, COMPLETION | {"return_token_ids": True})
            told = [event["choices"][0] for event in events[:-1]]
            assert [token for choice in told for token in choice["token_ids"]] == ids_of(PROMPT, N)
            assert [choice["prompt_token_ids"] for choice in told if "prompt_token_ids" in choice] == [
                prompt_ids(PROMPT)
            ]

    run(test)


@pytest.mark.parametrize("after", range(N + 1))
def test_text_that_lags_behind_its_tokens_is_neither_lost_nor_doubled(after: int) -> None:
    async def test(rig: Rig) -> None:
        engines = [await broken(rig, after), await broken(rig, after)]
        for engine in engines:
            engine.lags = True
        front = await start(rig, engines)
        events = await events_of(front, COMPLETION)
        assert text_of(events) == "".join(tokens_of(PROMPT, N))
        assert events[-1] == "[DONE]"
        assert not any(engine.crashed for engine in engines)

    run(test)


def test_a_stream_whose_tokens_are_all_there_is_ended_by_the_router() -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await broken(rig, N)])
        events = await events_of(front, COMPLETION | {"stream_options": {"include_usage": True}})
        assert text_of(events) == "".join(tokens_of(PROMPT, N))
        assert events[-3]["choices"][0]["finish_reason"] == "length"
        assert events[-2]["usage"]["completion_tokens"] == N
        assert events[-1] == "[DONE]"
        assert await outcomes(front) == {"completed": 1}

    run(test)


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 0.7},
        {"temperature": None},
        {"n": 2},
        {"logprobs": 0},
        {"stop": ["x"]},
        {"presence_penalty": 0.1},
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "a*"},
        {"prompt": ["a batch"]},
        {"max_tokens": None},
    ],
    ids=str,
)
def test_what_can_not_be_continued_soundly_is_told_that_it_broke_off(field: dict[str, Any]) -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await broken(rig, 2), await broken(rig, 2)])
        body = {name: value for name, value in (COMPLETION | field).items() if value is not None}
        events = await events_of(front, body)
        assert "broke off" in events[-1]["error"]["message"]
        assert await outcomes(front) == {"unsuited": 1}

    run(test)


def test_tools_and_pictures_are_not_continued() -> None:
    async def test(rig: Rig) -> None:
        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
        for field in ({"tools": [{"type": "function"}]}, {"messages": picture}):
            front = await start(rig, [await broken(rig, 2), await broken(rig, 2)])
            events = await events_of(front, CHAT | field)
            assert "broke off" in events[-1]["error"]["message"]

    run(test)


@pytest.mark.parametrize(
    ("resume", "field", "is_resumed"),
    [
        (Resume.OFF, {}, False),
        (Resume.SAMPLED, {"temperature": 0.7}, True),
        (Resume.SAMPLED, {"temperature": 0.7, "seed": 3}, False),
        (Resume.GREEDY, {"temperature": 0.7, "top_k": 1}, True),
    ],
)
def test_the_setting_says_which_streams_go_on(
    resume: Resume, field: dict[str, Any], is_resumed: bool
) -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await broken(rig, 2), await broken(rig, 2)], resume=resume)
        events = await events_of(front, COMPLETION | field)
        assert (events[-1] == "[DONE]") == is_resumed

    run(test)


def test_streams_that_break_off_again_and_again_end_after_all_attempts() -> None:
    async def test(rig: Rig) -> None:
        engines = [
            await rig.engine(Role.BOTH, breaks=lambda: "cut" if engines[0].requests else "") for _ in range(2)
        ]
        for engine in engines:
            events = iter([""] * 3 + ["cut"] + [""] * 3 + ["cut"] + [""] * 3 + ["cut"] * 9)
            engine.breaks = lambda events=events: next(events)  # type: ignore[misc]
        front = await start(rig, engines)
        events_ = await events_of(front, COMPLETION)
        assert "broke off" in events_[-1]["error"]["message"]
        assert "".join(tokens_of(PROMPT, N)).startswith(text_of(events_))
        assert sum(len(engine.requests) for engine in engines) == 3
        assert await outcomes(front) == {"resumed": 2, "failed": 1}

    run(test)


def test_a_pair_goes_on_with_a_pair() -> None:
    async def test(rig: Rig) -> None:
        prefill = await rig.engine(Role.PREFILL)
        decodes = [await rig.engine(Role.DECODE, die_after=5), await rig.engine(Role.DECODE)]
        front = await start(rig, [prefill, *decodes])
        for _ in range(2):
            assert text_of(await events_of(front, CHAT)) == "".join(tokens_of(MESSAGES, N))
        (given,) = [request["prompt"] for request in decodes[1].requests if "prompt" in request]
        assert given == prompt_ids(MESSAGES) + ids_of(MESSAGES, 5)
        assert any(
            request.get("prompt") == given and request["max_tokens"] == 1 for request in prefill.requests
        )
        assert not any("return_token_ids" in request for request in prefill.requests)

    run(test)


def test_an_engine_that_tells_no_tokens_is_passed_on_natively() -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH, tells_tokens=False, token_gate=asyncio.Semaphore(1))
        front = await start(rig, [engine])
        async with (
            aiohttp.ClientSession() as session,
            session.post(front.url + "/v1/completions", json=COMPLETION) as answer,
        ):
            await answer.content.readuntil(b"\n\n")
            assert front.app.relay is not None
            while not len(front.app.relay):
                await asyncio.sleep(0.005)
            for _ in range(N):
                engine.token_gate.release()
            assert (await answer.content.read()).endswith(b"[DONE]\n\n")

    run(test)


def test_sglang_pairs_go_on_with_completions_and_not_with_chats() -> None:
    async def test(rig: Rig) -> None:
        prefill = await rig.engine(Role.PREFILL, Mode.SGLANG)
        decodes = [await rig.engine(Role.DECODE, Mode.SGLANG) for _ in range(3)]
        for decode in decodes[:2]:
            decode.breaks = (await broken(rig, 4)).breaks
        front = await start(rig, [prefill, *decodes])
        assert text_of(await events_of(front, COMPLETION)) == "".join(tokens_of(PROMPT, N))
        assert not any(engine.crashed for engine in (prefill, *decodes))
        events = await events_of(front, CHAT)
        chats = [request for decode in decodes for request in decode.requests if "messages" in request]
        assert chats
        assert not any("return_token_ids" in request for request in chats)
        assert events[-1] == "[DONE]" or "broke off" in events[-1]["error"]["message"]

    run(test)


def test_an_instance_that_generates_something_else_does_not_go_on() -> None:
    async def test(rig: Rig) -> None:
        first = await broken(rig, 3)
        other = await rig.engine(Role.BOTH)
        for engine in (first, other):
            engine.burst = lambda: 2  # of two tokens at once nobody knows whether their text is all there
        other.differs = True
        front = await start(rig, [first, other], attempts=2)
        events = await events_of(front, COMPLETION)
        if not first.requests:  # the other one was asked, and was not compared with anybody
            events = await events_of(front, COMPLETION)
        assert "broke off" in events[-1]["error"]["message"]
        assert "".join(tokens_of(PROMPT, N)).startswith(text_of(events))

    run(test)
