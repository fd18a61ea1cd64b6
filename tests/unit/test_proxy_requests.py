"""The router before fake engines: what reaches them, what comes back, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import pytest

from fake_answers import honest_pages, tokens_of
from fake_engines import FakeEngine
from front import COMPLETION, joined, run, start, until
from p2pkv.instances.heartbeat import Mode, Role
from p2pkv_proxy.breaker import Phase
from rig import Rig


def test_vllm_prefills_first_and_its_params_go_to_the_decode() -> None:
    async def test(rig: Rig) -> None:
        prefill, decode = await rig.engine(Role.PREFILL), await rig.engine(Role.DECODE)
        front = await start(rig, [prefill, decode])
        body = COMPLETION | {"kv_transfer_params": {"remote_host": "evil"}, "min_tokens": 3}
        assert await front.text(body) == "".join(tokens_of("some prompt", 5))
        asked = prefill.requests[0]
        assert asked["max_tokens"] == 1
        assert not asked["stream"]
        assert "min_tokens" not in asked
        assert asked["kv_transfer_params"]["do_remote_decode"] is True
        assert decode.requests[0]["kv_transfer_params"] == {"remote_block_ids": [1, 2, 3]}
        assert decode.requests[0]["max_tokens"] == 5
        assert prefill.headers[0]["x-request-id"] == decode.headers[0]["x-request-id"]

    run(test)


def test_what_a_prefill_says_of_pages_is_the_routers_and_not_the_decodes() -> None:
    async def test(rig: Rig) -> None:
        prefill, decode = await rig.engine(Role.PREFILL), await rig.engine(Role.DECODE)
        front = await start(rig, [prefill, decode])
        for pages in (honest_pages("x" * 1000), "nonsense", {"version": 1}):
            prefill.pages = lambda prompt, pages=pages: pages  # type: ignore[misc]
            assert await front.text(COMPLETION) == "".join(tokens_of("some prompt", 5))
            assert decode.requests[-1]["kv_transfer_params"] == {"remote_block_ids": [1, 2, 3]}
        assert decode.crashed == ""

    run(test)


def test_a_stream_is_passed_on_as_it_comes() -> None:
    async def test(rig: Rig) -> None:
        decode = await rig.engine(Role.DECODE, token_gate=asyncio.Semaphore(1))
        front = await start(rig, [await rig.engine(Role.PREFILL), decode])
        async with front.session.post(
            front.url + "/v1/completions", json=COMPLETION | {"stream": True}
        ) as response:
            for token in tokens_of("some prompt", 5):
                # the next token is not made before this one is here
                event = json.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))
                assert event["choices"][0]["text"] == token
                decode.token_gate.release()
            assert (await response.read()) == b"data: [DONE]\n\n"

    run(test)


def test_older_connectors_find_both_addresses_in_the_request_id() -> None:
    async def test(rig: Rig) -> None:
        mode = Mode.VLLM_ADDRESSES
        prefill = await rig.engine(Role.PREFILL, mode, kv_address="10.0.0.1:14579")
        decode = await rig.engine(Role.DECODE, mode, kv_address="10.0.0.2:14579")
        front = await start(rig, [prefill, decode])
        await front.text(COMPLETION)
        name = prefill.headers[0]["x-request-id"]
        assert name.startswith("___prefill_addr_10.0.0.1:14579___decode_addr_10.0.0.2:14579_")
        assert decode.headers[0]["x-request-id"] == name

    run(test)


def test_sglang_gets_one_body_and_a_fresh_room_for_every_prompt() -> None:
    async def test(rig: Rig) -> None:
        prefill, decode = (
            await rig.engine(Role.PREFILL, Mode.SGLANG),
            await rig.engine(Role.DECODE, Mode.SGLANG),
        )
        front = await start(rig, [prefill, decode])
        stale = {"bootstrap_host": "evil", "bootstrap_room": 7}
        for _ in range(2):
            assert await front.text(COMPLETION | stale) == "".join(tokens_of("some prompt", 5))
        await front.text({"prompt": ["a", "b"], "max_tokens": 2})
        assert prefill.requests == decode.requests
        single, batch = prefill.requests[0], prefill.requests[2]
        assert single["bootstrap_host"] == "127.0.0.1"
        assert single["bootstrap_port"] == 8998
        assert batch["bootstrap_port"] == [8998, 8998]
        rooms = [prefill.requests[0]["bootstrap_room"], prefill.requests[1]["bootstrap_room"]]
        assert len({*rooms, *batch["bootstrap_room"]}) == 4
        assert not prefill.crashed
        assert not decode.crashed

    run(test)


def test_an_sglang_decode_is_never_asked_without_a_prefill() -> None:
    async def test(rig: Rig) -> None:
        decode = await rig.engine(Role.DECODE, Mode.SGLANG)
        front = await start(rig, [decode])
        status, answer, headers = await front.post(COMPLETION)
        assert status == 503
        assert "Retry-After" in headers
        assert "no pair" in answer["error"]["message"]
        assert decode.requests == []

    run(test)


def test_such_a_request_does_crash_an_engine() -> None:
    """The safeguard broken: what the test above keeps away is harmful."""

    async def test(rig: Rig) -> None:
        decode = await rig.engine(Role.DECODE, Mode.SGLANG)
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                async with session.post(decode.instance.url + "/generate", json={"text": "x"}) as response:
                    await response.read()
        assert decode.crashed

    run(test)


@pytest.mark.parametrize("is_stream", [False, True])
def test_log_probabilities_of_the_prompt_come_from_the_prefill(is_stream: bool) -> None:
    async def test(rig: Rig) -> None:
        engines = [await rig.engine(Role.PREFILL, Mode.SGLANG), await rig.engine(Role.DECODE, Mode.SGLANG)]
        front = await start(rig, engines)
        body = {"text": "x", "return_logprob": True, "sampling_params": {"max_new_tokens": 2}}
        if is_stream:
            answer = (await front.events(body, "/generate"))[0]
        else:
            _, answer, _ = await front.post(body, "/generate")
        assert answer["meta_info"]["input_token_logprobs"] == [[-1.0, 1, None], [-2.0, 2, None]]

    run(test)


@pytest.mark.parametrize("mode", [Mode.VLLM, Mode.SGLANG])
def test_a_client_that_leaves_is_cancelled_at_both_engines(mode: Mode) -> None:
    async def test(rig: Rig) -> None:
        prefill, decode = await rig.engine(Role.PREFILL, mode), await rig.engine(Role.DECODE, mode)
        stuck = [prefill, decode] if mode is Mode.SGLANG else [decode]
        for engine in stuck:
            engine.gate.clear()
        front = await start(rig, [prefill, decode])
        asking = asyncio.ensure_future(front.post(COMPLETION))
        await until(lambda: all(engine.requests for engine in stuck))
        asking.cancel()
        await until(lambda: all(engine.n_cancelled == 1 for engine in stuck))
        assert all(tracked.in_flight == 0 for tracked in front.app.registry)

    run(test)


def test_an_engines_refusal_reaches_the_client_as_it_is() -> None:
    async def test(rig: Rig) -> None:
        decode = await rig.engine(Role.DECODE, refusal=(422, b'{"error": "no such thing"}'))
        front = await start(rig, [await rig.engine(Role.PREFILL), decode])
        status, answer, _ = await front.post(COMPLETION)
        assert (status, answer) == (422, {"error": "no such thing"})
        assert len(decode.requests) == 1

    run(test)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_broken_or_busy_engine_is_passed_over(status: int) -> None:
    async def test(rig: Rig) -> None:
        bad = await rig.engine(Role.DECODE, refusal=(status, b'{"error": "own words"}'))
        good = await rig.engine(Role.DECODE)
        front = await start(rig, [await rig.engine(Role.PREFILL), bad, good])
        for _ in range(4):
            assert await front.text(COMPLETION) == "".join(tokens_of("some prompt", 5))
        good.refusal = bad.refusal
        assert (await front.post(COMPLETION))[:2] == (status, {"error": "own words"})

    run(test)


def test_a_pair_that_dies_before_the_first_token_is_replaced() -> None:
    async def test(rig: Rig) -> None:
        engines = [await rig.engine(role) for role in (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)]
        front = await start(rig, engines)
        for engine in engines:
            engine.gate.clear()
        asking = [asyncio.ensure_future(front.events(COMPLETION)) for _ in range(20)]
        await until(lambda: engines[0].requests != [] and engines[1].requests != [])
        engines[0].kill()
        engines[2].kill()
        for engine in engines:
            engine.gate.set()
        for events in await asyncio.gather(*asking):
            assert joined(events) == "".join(tokens_of("some prompt", 5))
            assert events[-1] == "[DONE]"
        assert await front.metric("p2pkv_proxy_retries_total") > 0

    run(test)


def test_without_another_attempt_the_same_death_is_an_error() -> None:
    """The safeguard broken: it is the retry that saves the requests."""

    async def test(rig: Rig) -> None:
        engines = [await rig.engine(role) for role in (Role.PREFILL, Role.PREFILL, Role.DECODE)]
        front = await start(rig, engines, attempts=1)
        engines[0].gate.clear()
        asking = [asyncio.ensure_future(front.post(COMPLETION)) for _ in range(4)]
        await until(lambda: engines[0].requests != [])
        engines[0].kill()
        assert 502 in [status for status, _, _ in await asyncio.gather(*asking)]

    run(test)


def test_an_answer_that_breaks_off_ends_with_an_error_and_no_done() -> None:
    async def test(rig: Rig) -> None:
        decode = await rig.engine(Role.DECODE, die_after=2)
        front = await start(rig, [await rig.engine(Role.PREFILL), decode, await rig.engine(Role.DECODE)])
        answers = [await front.events(COMPLETION) for _ in range(2)]
        broken = next(events for events in answers if events[-1] != "[DONE]")
        assert joined(broken) == "".join(tokens_of("some prompt", 2))
        assert "broke off" in broken[-1]["error"]["message"]
        assert len(decode.requests) == 1
        assert await front.metric("p2pkv_proxy_requests_total", outcome="broken_off") == 1

    run(test)


def test_a_stopped_engine_costs_its_deadline_and_no_more() -> None:
    async def test(rig: Rig) -> None:
        stuck = await rig.engine(Role.DECODE)
        front = await start(rig, [await rig.engine(Role.PREFILL), stuck], request_timeout=0.5)
        stuck.gate.clear()
        status, answer, _ = await front.post(COMPLETION)
        assert status == 504
        assert "in time" in answer["error"]["message"]
        await until(lambda: stuck.n_cancelled == 1)

    run(test)


def test_a_slow_instance_is_avoided_before_it_is_dead() -> None:
    async def test(rig: Rig) -> None:
        slow, quick = await rig.engine(Role.DECODE), await rig.engine(Role.DECODE)
        front = await start(rig, [await rig.engine(Role.PREFILL), slow, quick], slow_after=0.5)
        slow.gate.clear()
        stuck = [asyncio.ensure_future(front.events(COMPLETION)) for _ in range(2)]
        await until(lambda: slow.requests != [])
        tracked = next(tracked for tracked in front.app.registry if tracked.instance.id == slow.instance.id)
        await until(lambda: tracked.keeps_waiting(time.monotonic(), 0.5))
        for _ in range(6):
            await front.text(COMPLETION)
        assert len(slow.requests) == 1
        slow.gate.set()
        await asyncio.gather(*stuck)

    run(test)


async def in_turn(rig: Rig) -> list[FakeEngine]:
    """Start two engines, in the order in which round robin takes them."""
    return sorted([await rig.engine(Role.BOTH) for _ in range(2)], key=lambda engine: engine.instance.id)


def test_an_answer_in_one_piece_may_take_as_long_as_the_request() -> None:
    """Its first byte comes behind its last token: no sign of a slow instance, and no reason to have it made again."""

    async def test(rig: Rig) -> None:
        busy, other = await in_turn(rig)
        front = await start(rig, [busy, other], answer_timeout=0.2, slow_after=0.05)
        busy.gate.clear()
        long = asyncio.ensure_future(front.post(COMPLETION))
        await until(lambda: busy.requests != [])
        await asyncio.sleep(0.6)  # several times what the next bytes of a stream may take
        busy.gate.set()
        for _ in range(4):
            await front.text(COMPLETION)
        assert len(busy.requests) == len(other.requests) + 1 == 3
        assert (await long)[0] == 200
        assert await front.metric("p2pkv_proxy_retries_total") == 0

    run(test)


def test_a_stream_without_a_first_byte_is_given_up() -> None:
    async def test(rig: Rig) -> None:
        stuck, other = await in_turn(rig)
        front = await start(rig, [stuck, other], answer_timeout=1.0)
        stuck.gate.clear()
        events = await front.events(COMPLETION)
        assert joined(events) == "".join(tokens_of("some prompt", 5))
        assert len(stuck.requests) == len(other.requests) == 1

    run(test)


def test_an_open_breaker_refuses_nothing_that_nobody_else_can_do() -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH, refusal=(500, b"{}"))
        front = await start(rig, [engine], attempts=1)
        for _ in range(5):
            assert (await front.post(COMPLETION))[0] == 500
        tracked = next(iter(front.app.registry))
        assert tracked.breaker.phase is Phase.OPEN
        engine.refusal = None
        assert await front.text(COMPLETION) == "".join(tokens_of("some prompt", 5))
        assert tracked.breaker.phase is Phase.CLOSED

    run(test)


def test_what_is_too_much_is_refused_with_a_time_to_try_again() -> None:
    async def test(rig: Rig) -> None:
        decode = await rig.engine(Role.DECODE, capacity=2)
        front = await start(rig, [decode], max_in_flight=3, queue_timeout=0.1)
        decode.gate.clear()
        taken = [asyncio.ensure_future(front.post(COMPLETION)) for _ in range(2)]
        await until(lambda: len(decode.requests) == 2)
        status, _, headers = await front.post(COMPLETION)
        assert status == 429
        assert int(headers["Retry-After"]) >= 1
        decode.gate.set()
        assert [status for status, _, _ in await asyncio.gather(*taken)] == [200, 200]

    run(test)


def test_a_draining_instance_finishes_and_gets_nothing_new() -> None:
    async def test(rig: Rig) -> None:
        leaving, staying = await rig.engine(Role.DECODE), await rig.engine(Role.DECODE)
        front = await start(rig, [leaving, staying])
        leaving.gate.clear()
        asked = [asyncio.ensure_future(front.post(COMPLETION)) for _ in range(2)]
        await until(lambda: leaving.requests != [])
        name = leaving.instance.id
        far = {"x-forwarded-for": "192.0.2.1"}
        for asked_from in (far, {"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Host": ""}):
            assert (await front.post({}, f"/instances/{name}/drain", **asked_from))[0] == 403, asked_from
        status, answer, _ = await front.post({}, f"/instances/{name}/drain")
        assert (status, answer["state"]) == (200, "draining")
        for _ in range(4):
            await front.text(COMPLETION)
        assert len(leaving.requests) == 1
        leaving.gate.set()
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200, 200]

    run(test)


def test_the_choice_and_its_reason_are_told_on_request() -> None:
    async def test(rig: Rig) -> None:
        prefill, decode = await rig.engine(Role.PREFILL), await rig.engine(Role.DECODE)
        front = await start(rig, [prefill, decode])
        _, _, headers = await front.post(COMPLETION, **{"x-p2pkv-explain": "1"})
        assert f"prefill={prefill.instance.id} (turn)" in headers["x-p2pkv-route"]
        _, _, headers = await front.post(COMPLETION)
        assert "x-p2pkv-route" not in headers
        assert await front.metric("p2pkv_proxy_choices_total", reason="turn/turn") == 2

    run(test)
