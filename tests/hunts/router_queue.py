"""Requests that wait at the router for instances with room, while clients leave, settings change and instances go.

The room is the router's own; time is simulated, and so are instances: each line of requests has so many places.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv.instances.heartbeat import Instance, Mode, Role, checked
from p2pkv_proxy.call import Pair
from p2pkv_proxy.metrics import Metrics
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.routing import RefusedError
from p2pkv_proxy.settings import Settings
from p2pkv_proxy.tracked import Tracked
from p2pkv_proxy.waiting_room import Ticket, WaitingRoom
from virtual_time import run as run_virtually

_REQUESTS = 400
_SWEEP_S = 0.1
"""As often the router wakes all lines, whatever it was told."""
_LATE_S = 1e-3
_IDLE_S = 0.25
"""So long at most may there be room while somebody waits: what makes room may not say so."""
_TENANTS = ["", "a", "b", "c", "d"]
_LINES = ["one", "two"]
_PAIR = Pair(
    None,
    Tracked(checked(Instance(url="http://a:1", role=Role.BOTH, mode=Mode.VLLM)), is_listed=True),
    "",
    "",
)


@dataclass(eq=False, slots=True)
class Request:
    """One request, as its client sees it."""

    line: str
    ticket: Ticket
    began: float
    timeout: float
    """What settings said when it came."""
    is_over: bool = False
    served_since: Counter[str] = field(default_factory=Counter)
    """How often other tenants of the same priority had their turn while its own tenant waited in vain."""

    @property
    def is_waiting(self) -> bool:
        """Whether it stands in its line."""
        return self.ticket.number > 0 and not self.is_over


class World:
    """The instances, the requests, and what must be true of them."""

    def __init__(self, rng: random.Random, tally: Tally) -> None:
        self.rng = rng
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._capacity = dict.fromkeys(_LINES, 2)
        self._busy: Counter[str] = Counter()
        self._is_gone = False
        self._idle_since: dict[str, float] = {}
        self.requests: list[Request] = []
        self._turns: dict[tuple[str, str], Counter[str]] = {}
        self.room = WaitingRoom(Settings(), Metrics(Registry()), now=self._loop.time)
        self.change_settings()

    def change_settings(self) -> None:
        """Have others hold for who comes from now on; priorities for all."""
        self._turns.clear()
        self.room.settings = Settings(
            queue_length=self.rng.choice([0, 5, 40]),
            queue_bytes=self.rng.choice([200, 5000]),
            queue_timeout=self.rng.choice([0.5, 3.0, 20.0]),
            priorities={tenant: self.rng.choice([0, 0, 0, 1, -1]) for tenant in _TENANTS[1:]},
        )

    def change_capacity(self) -> None:
        """Have an instance come, go, or take more or fewer; nobody is told."""
        self._capacity[self.rng.choice(_LINES)] = self.rng.randint(1, 4)
        self._is_gone = self.rng.random() < 0.1

    async def ask(self) -> None:
        """Be one request: wait for a place, hold it for a time, and leave; or leave before."""
        rng = self.rng
        tenant, nbytes = rng.choice(_TENANTS), rng.choice([10, 100])
        ticket = Ticket(rng.choice([0, 0, 5]), tenant=tenant, nbytes=nbytes)
        timeout = self.room.settings.queue_timeout
        request = Request(rng.choice(_LINES), ticket, self._loop.time(), timeout)
        self.requests.append(request)
        choosing = asyncio.ensure_future(self._choose(request))
        await asyncio.sleep(0)
        self._judge_bounds(request)
        patience = rng.choice([None, None, rng.random() * 4])
        await asyncio.wait({choosing}, timeout=patience)
        if not choosing.done():
            choosing.cancel()
            with suppress(asyncio.CancelledError):
                await choosing
            self._tally["left"] += 1
            return
        try:
            choosing.result()
        except RefusedError as error:
            self._judge_refusal(request, error)
            return
        self._tally["served after waiting" if request.ticket.number else "served at once"] += 1
        await asyncio.sleep(rng.random())
        self._busy[request.line] -= 1
        if rng.random() < 0.9:  # a heartbeat says it else, and wakes nobody
            self.room.wake()

    async def _choose(self, request: Request) -> Pair:
        try:
            return await self.room.choose(lambda: self._take(request), request.line, request.ticket)
        finally:
            self._end(request)

    def _take(self, request: Request) -> Pair:
        if self._is_gone:
            raise RefusedError(503, "nobody is there")
        if self._busy[request.line] >= self._capacity[request.line]:
            raise RefusedError(429, "all are full")
        self._judge_turn(request)
        self._busy[request.line] += 1
        return _PAIR

    def _judge_turn(self, request: Request) -> None:
        """Demand that nobody else was to be next, of those who stood there before this moment."""
        now, own = self._loop.time(), request.ticket
        line = [
            one for one in self.requests if one.line == request.line and one.is_waiting and one.began < now
        ]
        others = [one for one in line if one is not request]
        if not own.number and others:
            raise Broken(f"a newcomer of {own.tenant!r} overtakes {len(others)} that wait")
        priorities = self.room.settings.priorities
        mine = priorities.get(own.tenant, 0)
        for one in others:
            theirs = priorities.get(one.ticket.tenant, 0)
            if theirs < mine:
                raise Broken(f"{own.tenant!r} (priority {mine}) overtakes {one.ticket.tenant!r} ({theirs})")
            if one.ticket.tenant == own.tenant and one.ticket < own:
                raise Broken(f"{own} overtakes {one.ticket}, which is more urgent or older")
        waiting = {one.ticket.tenant for one in others} - {own.tenant}
        for tenant in waiting:
            turns = self._turns.setdefault((request.line, tenant), Counter())
            turns[own.tenant] += priorities.get(tenant, 0) == mine
            if turns[own.tenant] > 1:
                raise Broken(f"{own.tenant!r} has had two turns while {tenant!r} waited")
            self._tally["turns"] += 1
        self._turns.pop((request.line, own.tenant), None)

    def _judge_bounds(self, request: Request) -> None:
        settings = self.room.settings
        waiting = [one for one in self.requests if one.is_waiting]
        nbytes = sum(one.ticket.nbytes for one in waiting)
        if request.is_waiting and (len(waiting) > settings.queue_length or nbytes > settings.queue_bytes):
            raise Broken(f"{len(waiting)} wait with {nbytes} bytes, of {settings.queue_length}")
        if len(waiting) != len(self.room):
            raise Broken(f"{len(waiting)} wait, and the room counts {len(self.room)}")

    def _judge_refusal(self, request: Request, error: RefusedError) -> None:
        took = self._loop.time() - request.began
        if error.status == 503:
            self._tally["nobody there"] += 1
        elif not request.ticket.number:
            self._tally["no room to wait"] += 1
            if took > _LATE_S:
                raise Broken(f"one was refused after {took} s for lack of room to wait")
        elif not request.timeout - _LATE_S <= took <= request.timeout + _LATE_S:
            raise Broken(f"one was sent away after {took} s, not {request.timeout}")
        else:
            self._tally["waited in vain"] += 1

    def _end(self, request: Request) -> None:
        request.is_over = True
        line = [one for one in self.requests if one.is_waiting and one.line == request.line]
        if request.ticket.tenant not in {one.ticket.tenant for one in line}:
            self._turns.pop((request.line, request.ticket.tenant), None)

    async def sweep(self) -> None:
        """Do what the router does ten times a second, and look whether room is left unused."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = self._loop.time()
            for line in _LINES:
                waits = any(one.is_waiting and one.line == line for one in self.requests)
                is_free = self._busy[line] < self._capacity[line] and not self._is_gone
                if not (waits and is_free):
                    self._idle_since.pop(line, None)
                elif now - self._idle_since.setdefault(line, now) > _IDLE_S:
                    raise Broken(f"there is room since {self._idle_since[line]}, and at {now} requests wait")
            self.room.wake()


async def _schedule(rng: random.Random, tally: Tally, stop: Stop) -> None:
    world = World(rng, tally)
    sweeping = asyncio.ensure_future(world.sweep())
    tasks: set[asyncio.Task[None]] = set()
    for _ in range(_REQUESTS):
        await asyncio.sleep(rng.expovariate(8.0))
        if sweeping.done() or stop():
            break
        tasks.add(asyncio.ensure_future(world.ask()))
        if rng.random() < 0.05:
            world.change_capacity()
        if rng.random() < 0.01:
            world.change_settings()
        world.requests = [one for one in world.requests if not one.is_over]
    world._is_gone = False
    all_gone = asyncio.gather(*tasks)
    await asyncio.wait({all_gone, sweeping}, return_when=asyncio.FIRST_COMPLETED)
    for one in (sweeping, all_gone):
        if one.done():
            await one
    sweeping.cancel()
    room = world.room
    if len(room) or room._lines or room._nbytes:
        raise Broken(f"all have gone, and there are {len(room)} waiting, lines {list(room._lines)}")


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Run one schedule."""
    run_virtually(_schedule(random.Random(seed), tally, stop))


HUNT = Hunt(
    "router_queue",
    "who waits is served in turn, as soon as there is room, or sent away on time",
    run,
    effects=("served after waiting", "turns", "waited in vain", "no room to wait", "left", "nobody there"),
    enough=10,
)
