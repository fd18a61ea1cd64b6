"""Large bodies: together they have bounds, and others are served beside them."""

from __future__ import annotations

import asyncio
import json
import threading

import msgspec
import pytest

from fake_engines import FakeEngine
from front import COMPLETION, Front, run, start, until
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy import prompts, token_ids
from p2pkv_proxy.large_bodies import LargeBodies
from p2pkv_proxy.prompts import BLOCK_TOKENS, MalformedError, decode_body, read_completion
from p2pkv_proxy.token_ids import TokenIds
from rig import Rig

LARGE, MOST = 2000, 10_000
BEGINNING = 4000
"""Bytes of token ids that are made into numbers."""


async def bounded(rig: Rig, **settings: float) -> tuple[Front, FakeEngine, LargeBodies]:
    engine = await rig.engine(Role.BOTH)
    front = await start(rig, [engine], max_body=20_000, **settings)
    services = front.app._services
    assert services is not None
    services.large_bodies = LargeBodies(MOST, LARGE)
    return front, engine, services.large_bodies


def body_of(nbytes: int) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    return body + b" " * (nbytes - len(body))


@pytest.mark.parametrize("is_chunked", [False, True])
def test_large_bodies_wait_for_each_other_and_nobody_for_them(is_chunked: bool) -> None:
    async def ask(front: Front, nbytes: int) -> int:
        async def pieces() -> object:
            yield body_of(nbytes)

        data = pieces() if is_chunked else body_of(nbytes)
        async with front.session.post(front.url + "/v1/completions", data=data) as answer:
            await answer.read()
            return answer.status

    async def test(rig: Rig) -> None:
        front, engine, bodies = await bounded(rig)
        engine.gate.clear()
        asking = [asyncio.ensure_future(ask(front, 4500)) for _ in range(5)]
        at_once = 1 if is_chunked else 2  # what does not say how much it is may be the most that is allowed
        await until(lambda: len(bodies._waiting) == 5 - at_once)
        assert bodies.nbytes == (20_000 if is_chunked else 2 * 4500)
        small = asyncio.ensure_future(front.post(COMPLETION))
        await until(lambda: front.app._serving.in_flight == 6)  # type: ignore[union-attr]
        engine.gate.set()
        assert (await small)[0] == 200
        assert await asyncio.gather(*asking) == [200] * 5
        assert bodies.nbytes == 0

    run(test)


def test_a_large_body_that_finds_no_room_in_time_is_refused() -> None:
    async def test(rig: Rig) -> None:
        front, engine, bodies = await bounded(rig, body_timeout=0.5)
        engine.gate.clear()
        first = asyncio.ensure_future(front.post(body_of(9000)))
        await until(lambda: bodies.nbytes == 9000)
        status, answer, _ = await front.post(body_of(9000))
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        engine.gate.set()
        assert (await first)[0] == 200
        assert (await front.post(body_of(9000)))[0] == 200

    run(test)


def test_whoever_leaves_makes_room() -> None:
    async def test(rig: Rig) -> None:
        front, _, bodies = await bounded(rig)
        writers = []
        for _ in range(4):
            _, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n{")
            writers.append(writer)
        await until(lambda: len(bodies._waiting) == 3)
        for writer in writers:
            writer.transport.abort()
        await until(lambda: bodies.nbytes == 0 and not bodies._waiting)
        assert (await front.post(body_of(9000)))[0] == 200

    run(test)


def test_a_large_one_is_read_beside_the_loop_and_one_after_another() -> None:
    async def test() -> None:
        bodies = LargeBodies(MOST, LARGE)
        may_end = threading.Event()
        threads: list[str] = []

        def work() -> None:
            threads.append(threading.current_thread().name)
            assert may_end.wait(60), "the loop waits for a large body"

        try:
            reading = [asyncio.ensure_future(bodies.in_turn(LARGE + 1, work)) for _ in range(3)]
            await until(lambda: len(threads) == 1)
            assert await bodies.in_turn(LARGE, lambda: "others") == "others"
            assert len(threads) == 1
            may_end.set()
            await asyncio.gather(*reading)
            assert set(threads) == {"p2pkv-large-bodies_0"}
        finally:
            may_end.set()
            bodies.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    "prompt",
    [
        [n * 7919 % 150_000 for n in range(2000)],
        [[1] * 1500, [2, 3], "a text"],
        "some text " * 1200,
        [["no id"], [1] * 4000],
        [1.5] * 4000,
        [-1] * 4000,
        [1 << 32, *[1] * 6000],
        [[], [1] * 6000],
        [],
    ],
)
def test_what_is_large_is_understood_as_what_is_not(prompt: object, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.dumps({"prompt": prompt, "max_tokens": 3}).encode()
    monkeypatch.setattr(token_ids, "_BEGINNING_BYTES", BEGINNING)

    def understood() -> tuple[object, ...] | str:
        try:
            body = decode_body(raw)
            found = read_completion(body)
        except MalformedError:
            return "malformed"
        blocks = found.blocks()[: BEGINNING // 8 // BLOCK_TOKENS]
        n = [len(part) for part in found.parts]
        return n, found.batch, found.n_tokens, blocks, json.loads(msgspec.json.encode(body))

    small = understood()
    monkeypatch.setattr(prompts, "_LARGE", 0)
    assert understood() == small


def test_ids_that_stay_as_they_came_are_still_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_ids, "_BEGINNING_BYTES", BEGINNING)
    ids = [n * 7919 % 150_000 for n in range(3000)]
    found = TokenIds(json.dumps(ids).encode())
    assert 100 < len(found.beginning) < len(ids)
    assert (len(found), found[5], found[2999], found[-1]) == (len(ids), ids[5], ids[2999], ids[-1])
    assert found[:50] == ids[:50]
    assert found[:] == ids
    assert found[-3:] == ids[-3:]


def test_room_goes_to_who_has_waited_for_longest() -> None:
    async def test() -> None:
        bodies = LargeBodies(10, 1)
        holds = [bodies.hold() for _ in range(4)]
        await holds[0].take(8)
        order: list[int] = []

        async def take(number: int, nbytes: int) -> None:
            await holds[number].take(nbytes)
            order.append(number)

        waiting = [asyncio.ensure_future(take(number, nbytes)) for number, nbytes in ((1, 9), (2, 1), (3, 1))]
        await asyncio.sleep(0)
        assert order == [], "one that is small enough went past a larger one, which might wait for ever"
        waiting[0].cancel()
        await asyncio.wait(waiting[1:])
        assert order == [2, 3]
        for hold in holds:
            hold.release()
        assert bodies.nbytes == 0

    asyncio.run(test())


def test_who_was_let_in_and_gave_up_at_once_makes_room() -> None:
    async def test() -> None:
        bodies = LargeBodies(10, 1)
        first, second, third = (bodies.hold() for _ in range(3))
        await first.take(9)
        waiting = [asyncio.ensure_future(hold.take(9)) for hold in (second, third)]
        await asyncio.sleep(0)
        waiting[1].cancel()  # it has not run since
        first.release()
        waiting[0].cancel()
        await asyncio.wait(waiting)
        assert (bodies.nbytes, len(bodies._waiting)) == (0, 0)

    asyncio.run(test())
