"""Requests that wait while all instances are full: who goes next, for how long, and how many there may be."""

from __future__ import annotations

import asyncio
from typing import Any

from fake_engines import FakeEngine
from front import COMPLETION, Front, run, start, until
from p2pkv.instances.heartbeat import Instance, Role
from p2pkv_proxy.call import Pair
from p2pkv_proxy.metrics import Metrics
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.routing import RefusedError
from p2pkv_proxy.settings import Settings
from p2pkv_proxy.tracked import Tracked
from p2pkv_proxy.waiting_room import Ticket, WaitingRoom
from rig import Rig


async def busy(rig: Rig, **settings: Any) -> tuple[Front, FakeEngine, asyncio.Task[Any]]:
    """A router whose one instance is full, and the request that fills it."""
    engine = await rig.engine(Role.BOTH, capacity=1, gate=asyncio.Event())
    front = await start(rig, [engine], **settings)
    first = asyncio.ensure_future(front.post(COMPLETION))
    await until(lambda: len(engine.requests) == 1)
    return front, engine, first


def room_of(front: Front) -> WaitingRoom:
    assert front.app._serving is not None
    return front.app._serving._services.waiting_room


def test_a_request_waits_for_an_instance_with_room() -> None:
    async def test(rig: Rig) -> None:
        front, engine, first = await busy(rig)
        second = asyncio.ensure_future(front.post(COMPLETION))
        await until(lambda: len(room_of(front)) == 1)
        assert await front.metric("p2pkv_proxy_queued_requests") == 1
        engine.gate.set()
        assert [(await one)[0] for one in (first, second)] == [200, 200]
        assert len(room_of(front)) == 0

    run(test)


def test_who_finds_no_room_in_time_is_told_to_come_again() -> None:
    async def test(rig: Rig) -> None:
        front, engine, first = await busy(rig, queue_timeout=0.2)
        status, _, headers = await front.post(COMPLETION)
        assert (status, headers["retry-after"]) == (429, "1")
        engine.gate.set()
        await first

    run(test)


def test_the_room_is_bounded_in_requests_and_in_bytes() -> None:
    async def test(rig: Rig) -> None:
        for bound in ({"queue_length": 1}, {"queue_bytes": 60}):
            front, engine, first = await busy(rig, **bound)
            second = asyncio.ensure_future(front.post(COMPLETION))
            await until(lambda front=front: len(room_of(front)) == 1)  # type: ignore[misc]
            assert (await front.post(COMPLETION))[0] == 429
            engine.gate.set()
            assert [(await one)[0] for one in (first, second)] == [200, 200]

    run(test)


def test_a_client_that_leaves_leaves_the_room() -> None:
    async def test(rig: Rig) -> None:
        front, engine, first = await busy(rig)
        second = asyncio.ensure_future(front.post(COMPLETION))
        await until(lambda: len(room_of(front)) == 1)
        second.cancel()
        await until(lambda: len(room_of(front)) == 0)
        assert room_of(front)._nbytes == 0
        assert not room_of(front)._lines
        engine.gate.set()
        await first

    run(test)


def test_keys_take_turns_and_of_one_keys_the_most_urgent_goes_first() -> None:
    async def test(rig: Rig) -> None:
        registry = Registry()
        room = WaitingRoom(Settings(), Metrics(registry))
        pair = Pair(None, Tracked(Instance(url="http://a:1", role=Role.BOTH), is_listed=True), "", "")
        n_free, served = [0], []

        async def ask(name: str, tenant: str, priority: int) -> None:
            def choose() -> Pair:
                if n_free[0] == 0:
                    raise RefusedError(429, "full")
                n_free[0] -= 1
                served.append(name)
                return pair

            await room.choose(choose, "a line", Ticket(priority, tenant=tenant))

        asked = [
            ("a1", "a", 0),
            ("a2", "a", 0),
            ("a3", "a", -1),
            ("b1", "b", 5),
            ("a4", "a", 0),
            ("c1", "c", 0),
        ]
        tasks = []
        for one in asked:
            tasks.append(asyncio.ensure_future(ask(*one)))
            await asyncio.sleep(0)
        room.wake()  # in vain: whoever tries keeps its place
        await asyncio.sleep(0.01)
        for _ in asked:
            n_free[0] = 1
            n_before = len(served)
            while len(served) == n_before:
                room.wake()
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert served == ["a3", "b1", "c1", "a1", "a2", "a4"]
        assert len(room) == 0

    run(test)


def test_a_line_does_not_hold_up_another() -> None:
    async def test(rig: Rig) -> None:
        full = await rig.engine(Role.BOTH, capacity=1, gate=asyncio.Event(), model="full")
        free = await rig.engine(Role.BOTH, model="free")
        front = await start(rig, [full, free])
        waiting = [asyncio.ensure_future(front.post(COMPLETION | {"model": "full"})) for _ in range(3)]
        await until(lambda: len(room_of(front)) == 2)
        assert (await front.post(COMPLETION | {"model": "free"}))[0] == 200
        full.gate.set()
        assert [(await one)[0] for one in waiting] == [200] * 3

    run(test)
