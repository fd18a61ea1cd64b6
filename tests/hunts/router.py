"""Clients and engines that misbehave at random, before one router: who behaves is served, or told that it was not.

Every prompt is asked for once, so that an answer says whose it is: one that went to somebody else, that is longer or
shorter than it claims, or that only looks whole, is seen.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import logging
import random
import time
import traceback

import aiohttp
import uvloop

from fake_answers import honest_pages, page_names
from fake_engines import MOODS, TOLD_TO, FakeEngine
from hunts.frame import Broken, Hunt, Stop, Tally
from hunts.router_clients import LARGE, Clients
from p2pkv import _native
from p2pkv.errors import ControlError
from p2pkv.instances.heartbeat import Mode, Role
from p2pkv.page import Keys, Namespace
from p2pkv.testing.lateness import Lateness
from p2pkv_proxy.app import App
from p2pkv_proxy.held import Place
from p2pkv_proxy.holdings import Holdings
from p2pkv_proxy.idle_connections import IDLE, IdleConnections
from p2pkv_proxy.large_bodies import LargeBodies
from p2pkv_proxy.named_pages import NamedPages
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.settings import Settings
from patience import PATIENCE
from rig import Rig

_ANSWER_S = 0.5
"""For engines' next bytes. On a machine that stands still for so long good engines fail too."""
_ROUNDS = 12
_AT_ONCE = 8
_POLICIES = (
    "round_robin",
    "random",
    "prefix",
    "session",
    "kv_space",
    "cache_aware",
    "predicted",
    "predicted",
)
_MOST_IDLE = 30
"""Connections without a request: those of the good clients, and not all of a crowd."""
_MOST_LARGE = 5 * LARGE
_MOST_MARKS, _MOST_NBYTES = 40, 4000
"""Bounds of what the router keeps of pages, so low that they are reached."""
_ENGINES_OWN = "the handler is closed"
"""What uvicorn under uvloop fails with in an engine that the router has just hung up on; in the router it would say so,
with the router's own code in the trace."""
_END_S = 10.0
"""For the router to have let go of everything, once all clients have gone; its deadlines are two seconds at most."""


class Router:
    """The router, its engines of which some misbehave, and what was logged that should not have been."""

    def __init__(self, rng: random.Random, rig: Rig) -> None:
        self._rng = rng
        self._rig = rig
        self.engines: list[FakeEngine] = []
        self.bad: list[FakeEngine] = []

    async def start(self) -> None:
        """Start them all, and wait until all are ready."""
        mode = self._rng.choice([Mode.VLLM, Mode.VLLM, Mode.SGLANG])
        roles = self._rng.choice([[Role.BOTH], [Role.PREFILL, Role.DECODE]])
        for role in roles:
            for number in range(self._rng.randint(2, 3)):
                engine = await self._rig.engine(role, mode, pieces=self._cut)
                self.engines.append(engine)
                if number:  # the first of each role is good
                    self.bad.append(engine)
        policy, decode_policy = self._rng.choice(_POLICIES), self._rng.choice(_POLICIES)
        self.app = App(
            Plan(
                settings=Settings(
                    answer_timeout=_ANSWER_S,
                    client_timeout=0.5,
                    body_timeout=0.5,
                    request_timeout=2.0,
                    connect_timeout=0.5,
                ),
                instances=tuple(engine.instance for engine in self.engines),
                prefill_policy=policy,
                decode_policy=decode_policy,
            )
        )
        listening = await self._rig.router(self.app)
        self.url = listening.url
        self._idle = IdleConnections(self.app.metrics.ended_idle.inc, _MOST_IDLE)
        listening.server.lifespan.state[IDLE] = self._idle
        services = self.app._services
        assert services is not None
        services.large_bodies = self._bodies = LargeBodies(_MOST_LARGE, LARGE)
        while not all(tracked.state.value == "ready" for tracked in self.app.registry):
            await asyncio.sleep(0.005)
        # the directory is the cluster's, of which there is none here
        self.holdings.named = NamedPages(most_marks=_MOST_MARKS, most_nbytes=_MOST_NBYTES)
        self.holdings._observer = self.directory = Directory()  # type: ignore[assignment]
        for engine in self.engines:
            engine.pages = self._says
        for engine in self.bad:
            engine.pages = self._lies
            share, moods = self._rng.choice([0.0, 0.3, 1.0]), self._rng.sample(MOODS, 2)
            engine.mood = lambda share=share, moods=moods: (  # type: ignore[misc]
                self._rng.choice(moods) if self._rng.random() < share else ""
            )

    @property
    def holdings(self) -> Holdings:
        """What the router knows of pages."""
        assert self.app._serving is not None
        return self.app._serving._services.holdings

    def _says(self, prompt: str) -> object:
        self.directory.publish(page_names(prompt))
        return honest_pages(prompt)

    def _lies(self, prompt: str) -> object:
        """Say what is not so, or what can't be."""
        said = dict(honest_pages(prompt))
        field = self._rng.choice(list(said))
        match self._rng.randrange(4):
            case 0:
                said[field] = self._rng.choice([0, 0, -1, 1 << 70, "", "x" * 5000, None, [dict(said)]])
            case 1:
                said["packed"] = base64.b64encode(self._rng.randbytes(16 * self._rng.randrange(200))).decode()
            case 2:
                said = dict(honest_pages(prompt[: self._rng.randrange(len(prompt))]))
            case 3:
                return self._rng.choice([None, [], "pages", 1, {}, {"version": 1}])
        return said

    def judge_bounds(self) -> None:
        """Demand that there are no more connections without a request, nor bytes of bodies, than there may be."""
        if self._bodies.nbytes > _MOST_LARGE:
            raise Broken(f"large bodies have {self._bodies.nbytes} bytes, and {_MOST_LARGE} are allowed")
        if len(self._idle) > _MOST_IDLE:
            raise Broken(f"{len(self._idle)} connections without a request, and {_MOST_IDLE} are allowed")

    def judge_pages(self) -> int:
        """Demand that what is kept of pages is within its bounds and what it says it is; return how much that is."""
        named = self.holdings.named
        kept = {id(mark.told): mark.told for mark in named._marks.values()}
        nbytes = sum(len(told.report.packed) for told in kept.values())
        if nbytes != named.nbytes or len(named) > _MOST_MARKS or nbytes > _MOST_NBYTES:
            raise Broken(f"{len(named)} texts have {nbytes} bytes of names, counted as {named.nbytes}")
        return len(named)

    def _cut(self, event: bytes) -> list[bytes]:
        """Cut most events in two: a read has the end of one and the beginning of the next."""
        at = self._rng.randint(1, len(event) - 1)
        return [event[:at], event[at:]] if self._rng.random() < 0.8 else [event]

    def disturb(self) -> None:
        """Have one of the bad engines die, fall ill or be drained, now and then."""
        if not self.bad or self._rng.random() < 0.7:
            return
        engine = self._rng.choice(self.bad)
        match self._rng.randrange(3):
            case 0:
                self.bad.remove(engine)
                engine.kill()
            case 1:
                engine.is_healthy = not engine.is_healthy
            case 2:
                tracked = self.app.registry.get(engine.instance.id)
                if tracked is not None:
                    tracked.is_draining_here = not tracked.is_draining_here

    @property
    def n_passed_on(self) -> int:
        """Streams whose end was passed on natively."""
        assert self.app.relay is not None
        return self.app.relay.n_streams

    def under_way(self) -> dict[str, int]:
        """Return what has not ended: at the router, and at instances as it counts them."""
        assert self.app._serving is not None
        assert self.app.relay is not None
        counts = {tracked.id: tracked.in_flight for tracked in self.app.registry}
        own = {"router": self.app._serving.in_flight, "relay": len(self.app.relay)}
        own |= {"bytes of large bodies": self._bodies.nbytes}
        return {name: n for name, n in {**own, **counts}.items() if n}


class Directory:
    """Where the router asks who has pages: those that a good engine has published are somewhere, at times."""

    has_view = True

    def __init__(self) -> None:
        self.epochs = _native.NamespaceEpochs()
        self._namespace = Namespace("n", self.epochs)
        self._published: set[bytes] = set()
        self.n_asked = 0

    def publish(self, names: list[bytes]) -> None:
        self._published.update(key.tobytes() for key in self._namespace.hash(names))

    def places(self, keys: Keys, timeout: float) -> list[Place | None]:
        """Answer as the observer does, from one of its threads."""
        self.n_asked += 1
        if self.n_asked % 7 == 0:
            raise ControlError("the directory does not answer")
        return [Place("n1") if key.tobytes() in self._published else None for key in keys]

    def close(self) -> None:
        """There is nothing to close."""


class Complaints(logging.Handler):
    """Errors in the log that the router's own code is part of, and of engines that failed though nobody told them to.

    What an engine of the hunt fails with by itself reaches a good client as that engine's status 500.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it if it is the router's."""
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
        is_wanted = _ENGINES_OWN in trace or TOLD_TO in trace or "CancelledError" in trace
        if "p2pkv_proxy" in trace or (record.name in ("asyncio", "uvicorn.error") and not is_wanted):
            self.found.append(f"{record.getMessage()}\n{trace}")


async def _schedule(rng: random.Random, tally: Tally, stop: Stop) -> None:
    before = tally.copy()
    async with Rig() as rig:
        router = Router(rng, rig)
        await router.start()
        session = await rig.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60 * PATIENCE))
        )
        clients = Clients(rng, tally, router.url, session)
        with Lateness() as late:
            for _ in range(_ROUNDS):
                router.disturb()
                await asyncio.gather(
                    *(clients.good() for _ in range(_AT_ONCE)),
                    *(clients.bad() for _ in range(rng.randrange(4))),
                )
                router.judge_pages()
                router.judge_bounds()
                if stop():
                    break
        clients.leave()
        until = time.monotonic() + _END_S * PATIENCE
        while (left := router.under_way()) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        if left:
            raise Broken(f"all clients have gone, and there still are {left}")
        n_whole, n_told = (tally[name] - before[name] for name in ("whole", "told"))
        is_late = late.worst > _ANSWER_S / 2
        tally["schedules on a machine that was late"] += is_late
        if n_whole + n_told == _ROUNDS * _AT_ONCE and n_told > n_whole and not is_late:
            raise Broken(
                f"{n_told} of {n_told + n_whole} answers broke off or failed, though there are good engines"
            )
        for engine in router.engines:
            if engine.crashed:
                raise Broken(f"an engine got what crashes it: {engine.crashed}")
        tally["texts with pages"] += router.judge_pages()
        tally["pages asked for"] += router.directory.n_asked
        tally["attempts more"] += int(router.app.metrics.retries._value.get())
        tally["idle ended"] += int(router.app.metrics.ended_idle._value.get())
        tally["passed on natively"] += router.n_passed_on
        tally["breakers opened"] += sum(tracked.breaker.opened for tracked in router.app.registry)


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Run one schedule on a loop of its own; the two that a router may have write at different times."""
    complaints = Complaints()
    logging.getLogger().addHandler(complaints)
    try:
        rng = random.Random(seed)
        # in turns: what a loop opens once and keeps is there after the first two schedules
        run_loop = [asyncio.run, uvloop.run][seed % 2]
        run_loop(_schedule(rng, tally, stop))
    except Broken as broken:
        if not complaints.found:
            raise
        raise Broken(
            f"{broken}; the router had complained:\n" + "\n".join(complaints.found)[:3000]
        ) from broken
    finally:
        logging.getLogger().removeHandler(complaints)
        gc.collect()  # tasks and their connections are in cycles
    if complaints.found:
        raise Broken("the router complained:\n" + "\n".join(complaints.found)[:3000])


HUNT = Hunt(
    "router",
    "whoever behaves has a right and whole answer or is told that it has none; nothing stays behind",
    run,
    effects=(
        "whole",
        "told",
        "bad clients",
        "attempts more",
        "breakers opened",
        "idle ended",
        "passed on natively",
        "texts with pages",
        "pages asked for",
    ),
    enough=20,
)
