"""The parent of several workers that serve one port: it takes heartbeats, adds up loads, and starts anew who dies.

Each worker is a whole router with a registry of its own. What they must agree on comes from here: who is there
(heartbeats go to all), what each instance has to do (the others' requests and tokens, twenty times a second), and who
drains. The parent answers no request, so none is lost with it; without it the workers end as at SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from multiprocessing.process import BaseProcess

import typer

from p2pkv.errors import ControlError
from p2pkv.instances.heartbeat import Heartbeat, State, pack
from p2pkv_proxy.crew_pipe import Ask, Beat, Drain, Loads, Message, Pages, Pipe, Ready, Reload
from p2pkv_proxy.neighbourhood import Neighbourhood
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.reloading import Reloading
from p2pkv_proxy.replicas import Replicas
from p2pkv_proxy.server import LAST_WORDS_S, bound, shown_address
from p2pkv_proxy.worker import work

_log = logging.getLogger(__name__)
SHARE_S = 0.05
"""Between two sums of loads: about a request's time at a busy router, and no work worth speaking of."""
_PAGES_S = 1.0
"""For all workers to tell their metrics."""
_SHORT_LIFE_S = 5.0
_MOST_SHORT_LIVES = 5
"""Workers in a row that end so soon: then starting more is of no use."""
_END_S = 5.0
"""Beyond the time to drain, until what has not ended is killed."""
_SILENT_S = 10.0
"""A worker says something every second. One that is stopped, or turns in a circle, would keep its clients waiting."""
_OVERSLEPT_S = 1.0
"""Who was not running himself for so long knows nothing of the others' silence."""


class _Worker:
    """One worker's process, as the parent sees it."""

    def __init__(self, process: BaseProcess, pipe: Pipe) -> None:
        self.process = process
        self.pipe = pipe
        self.began = time.monotonic()
        self.is_ready = False
        self.heard = self.began
        self.loads: dict[str, tuple[int, int]] = {}


class Crew:
    """All workers. It is what :class:`Discovery` reports to."""

    def __init__(self, plan: Plan, host: str, port: int, n_workers: int) -> None:
        """Take the port. Raises :class:`ControlError`."""
        # bound, but listening to nobody: the port stays ours while workers come and go
        self._reserved = bound(host, port, is_shared=True)
        self._address: tuple[str, int] = self._reserved.getsockname()[:2]
        # the parent reads files too, so that workers that are started later begin with what is in force
        self._reloading = Reloading(plan, lambda plan: None)
        self._n_workers = n_workers
        self._workers: list[_Worker] = []
        self._ending = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._beats: dict[str, tuple[float, bytes]] = {}
        self._draining: set[str] = set()
        self._is_changed = False
        self._n_asked = 0
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._n_short_lives = 0
        self._failure: str | None = None
        self.replicas: Replicas | None = None
        self._replicas: dict[str, tuple[int, int]] = {}
        self.refused = 0
        self.strangers: Callable[[], int] = lambda: 0

    async def run(self) -> None:
        """Serve until SIGINT or SIGTERM. Raises :class:`ControlError` if workers don't stay alive."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._ending.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        neighbourhood = None
        try:
            where = ""
            if (around := self._plan.around) is not None:
                neighbourhood = Neighbourhood(around, self, self._under_way, self._note_replicas)
                where = f", heartbeats on {neighbourhood.discovery.address}"
                for work in neighbourhood.work():
                    self._begin(work)
            for _ in range(self._n_workers):
                self._begin(self._keep_one())
            self._begin(self._share())
            self._begin(self._reloading.follow())
            while (
                not self._ending.is_set()
                and sum(worker.is_ready for worker in self._workers) < self._n_workers
            ):
                await asyncio.sleep(0.01)
            if not self._ending.is_set():
                shown = shown_address(*self._address, is_tls=self._plan.certificate is not None)
                typer.echo(f"p2pkv-proxy listens on {shown}{where}")
            await self._ending.wait()
        finally:
            await self._end()
            if neighbourhood is not None:
                neighbourhood.close()
            self._reserved.close()
        if self._failure is not None:
            raise ControlError(self._failure)

    @property
    def _plan(self) -> Plan:
        return self._reloading.plan

    @property
    def _workers_plan(self) -> Plan:
        return replace(self._plan, heartbeats=None, n_workers=self._n_workers)

    def _reload(self) -> None:
        self._reloading.read_all()
        self._tell(Reload())

    # what Discovery reports to

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Pass on a heartbeat to all workers; whoever is started later gets the last one of each instance."""
        packed = pack(heartbeat)
        name = heartbeat.instance.id
        if heartbeat.state is State.LEFT:
            self._beats.pop(name, None)
            self._draining.discard(name)  # if it comes back it drains no more, here as in the workers
        else:
            self._beats[name] = time.monotonic(), packed
        self._tell(Beat(packed))

    def _under_way(self) -> dict[str, tuple[int, int]]:
        return added([worker.loads for worker in self._workers])

    def _note_replicas(self, loads: Mapping[str, tuple[int, int]]) -> None:
        both = self._replicas | dict(loads)
        self._replicas = {name: counts for name, counts in both.items() if counts != (0, 0)}
        self._is_changed = True

    # workers

    async def _keep_one(self) -> None:
        """Run one worker after another."""
        while not self._ending.is_set():
            worker = await self._start()
            async for message in worker.pipe.messages():
                self._take(worker, message)
            worker.pipe.close()
            worker.is_ready, worker.loads, self._is_changed = False, {}, True
            await asyncio.get_running_loop().run_in_executor(None, self._join, worker.process)
            self._workers.remove(worker)
            if not self._ending.is_set():
                await self._note_death(worker)

    def _join(self, process: BaseProcess) -> None:
        """Wait until a process that has hung up has ended; it drains first, and is killed if it takes too long."""
        process.join(self._plan.in_force.drain_timeout + LAST_WORDS_S + _END_S)
        process.kill()
        process.join()

    async def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        process = multiprocessing.get_context("spawn").Process(
            target=work,
            args=(self._workers_plan, *self._address, theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        worker = _Worker(process, await Pipe.open(ours))
        self._workers.append(worker)
        now = time.monotonic()
        self._beats = {
            name: beat for name, beat in self._beats.items() if now - beat[0] < self._plan.lifetime
        }
        for _, packed in self._beats.values():
            worker.pipe.send(Beat(packed))
        for instance in self._draining:
            worker.pipe.send(Drain(instance, to=True))
        self._is_changed = True
        return worker

    async def _note_death(self, worker: _Worker) -> None:
        is_short = time.monotonic() - worker.began < _SHORT_LIFE_S
        self._n_short_lives = self._n_short_lives + 1 if is_short else 0
        _log.warning("a worker has ended with status %s; another one is started", worker.process.exitcode)
        if self._n_short_lives >= _MOST_SHORT_LIVES:
            self._failure = "the workers end as soon as they are started; see what they logged"
            self._ending.set()

    def _take(self, worker: _Worker, message: Message) -> None:
        worker.heard = time.monotonic()
        if isinstance(message, Loads):
            worker.loads = message.at
            self._is_changed = True
        elif isinstance(message, Ready):
            worker.is_ready = True
        elif isinstance(message, Drain):
            (self._draining.add if message.to else self._draining.discard)(message.instance)
            self._tell(message, but=worker)
        elif isinstance(message, Ask):
            self._begin(self._collect(worker, message.number))
        elif isinstance(message, Pages):
            asked = self._asked.get(message.number)
            if asked is not None and not asked.done():
                asked.set_result(message.texts[0])

    def _tell(self, message: Message, but: _Worker | None = None) -> None:
        for worker in self._workers:
            if worker is not but:
                worker.pipe.send(message)

    async def _share(self) -> None:
        """Tell each worker what the others have under way, whenever it has changed; end those who say nothing."""
        told = looked = time.monotonic()
        while True:
            await asyncio.sleep(SHARE_S)
            now = time.monotonic()
            self._end_silent(now, has_overslept=now - looked > _OVERSLEPT_S)
            looked = now
            if not self._is_changed and now - told < 1.0:  # what a full pipe has dropped is said again
                continue
            self._is_changed, told = False, now
            n_replicas = len(self.replicas.heard.replicas) if self.replicas is not None else 0
            for worker in self._workers:
                others = [other.loads for other in self._workers if other is not worker]
                worker.pipe.send(Loads(added(others), self._replicas, n_replicas))

    def _end_silent(self, now: float, *, has_overslept: bool) -> None:
        for worker in self._workers:
            if has_overslept or not worker.is_ready:
                worker.heard = now
            elif now - worker.heard > _SILENT_S:
                _log.warning(
                    "worker %s has said nothing for %.0f s and is killed", worker.process.pid, _SILENT_S
                )
                worker.is_ready = False  # once
                worker.process.kill()

    async def _collect(self, asker: _Worker, number: int) -> None:
        """Answer a worker with the others' metrics, of those that tell them in time."""
        asked = []
        for worker in self._workers:
            if worker is not asker and worker.is_ready:
                self._n_asked += 1
                future = self._asked[self._n_asked] = asyncio.get_running_loop().create_future()
                asked.append((self._n_asked, future))
                worker.pipe.send(Ask(self._n_asked))
        if asked:
            await asyncio.wait([future for _, future in asked], timeout=_PAGES_S)
        asker.pipe.send(Pages(number, [future.result() for _, future in asked if future.done()]))
        for key, _ in asked:
            del self._asked[key]

    def _begin(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the router has failed; the router ends", exc_info=error)
            self._failure = f"the router's parent has failed: {error}"
            self._ending.set()

    async def _end(self) -> None:
        """End all workers; those that take too long are killed."""
        self._ending.set()
        processes = [worker.process for worker in self._workers]
        for process in processes:
            process.terminate()
        until = time.monotonic() + self._plan.in_force.drain_timeout + LAST_WORDS_S + _END_S
        while any(process.is_alive() for process in processes) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for process in processes:
            process.kill()
            process.join()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def added(loads: list[dict[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Return the sum of requests and tokens at each instance."""
    requests: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for one in loads:
        for name, (n_requests, n_tokens) in one.items():
            requests[name] += n_requests
            tokens[name] += n_tokens
    return {name: (requests[name], tokens[name]) for name in requests}


def serve_with(plan: Plan, host: str, port: int, n_workers: int) -> None:
    """Serve by several processes until SIGINT or SIGTERM. Raises :class:`ControlError`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is who hears it

    async def run() -> None:
        await Crew(plan, host, port, n_workers).run()

    asyncio.run(run())
