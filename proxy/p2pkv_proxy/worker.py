"""One of several processes that serve a port together: a whole router that hears of the others from the parent."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable

from p2pkv.cli.logs import write_logs
from p2pkv.instances.heartbeat import unpack
from p2pkv_proxy.app import App
from p2pkv_proxy.crew_pipe import Ask, Beat, Drain, Loads, Message, Pages, Pipe, Ready, Reload
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.server import bound, serve_on

_REPORT_S = 0.05
_AT_LEAST_EVERY_S = 1.0
"""Loads are told so often though nothing has changed: the parent kills who is silent for long."""
_PAGES_S = 2.0


class Parent:
    """The other workers, by way of the parent. :meth:`run` must run."""

    def __init__(
        self, end: socket.socket, registry: Registry, page: Callable[[], str], reload: Callable[[], None]
    ) -> None:
        """``page`` returns this worker's metrics; ``reload`` reads its files again."""
        self._end = end
        self._registry = registry
        self._page = page
        self._reload = reload
        self._pipe: Pipe | None = None
        self._n_asked = 0
        self._asked: dict[int, asyncio.Future[list[str]]] = {}

    async def run(self) -> None:
        """Take what the parent says, and tell it of the load here; end the process when the parent has gone."""
        self._pipe = await Pipe.open(self._end)
        self._pipe.send(Ready())
        reporting = asyncio.ensure_future(self._report(self._pipe))
        try:
            async for message in self._pipe.messages():
                self._take(self._pipe, message)
            logging.getLogger(__name__).warning("the router's parent has gone; this worker ends")
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            reporting.cancel()
            self._pipe.close()

    def set_draining(self, instance: str, *, to: bool) -> None:
        """Tell the others."""
        if self._pipe is not None:
            self._pipe.send(Drain(instance, to))

    async def pages(self) -> list[str]:
        """Return the others' metrics, of those that tell them in time."""
        if self._pipe is None:
            return []
        self._n_asked += 1
        number = self._n_asked
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._pipe.send(Ask(number))
        try:
            await asyncio.wait({future}, timeout=_PAGES_S)
            return future.result() if future.done() else []
        finally:
            del self._asked[number]

    def _take(self, pipe: Pipe, message: Message) -> None:
        if isinstance(message, Beat):
            self._registry.note_heartbeat(unpack(message.packed))
        elif isinstance(message, Loads):
            self._registry.note_elsewhere(message.at)
            nothing = (0, 0)
            replicas = {tracked.id: message.replicas.get(tracked.id, nothing) for tracked in self._registry}
            self._registry.note_replicas(replicas)
            self._registry.n_replicas_told = message.n_replicas
        elif isinstance(message, Drain):
            self._registry.set_draining(message.instance, to=message.to)
        elif isinstance(message, Reload):
            self._reload()
        elif isinstance(message, Ask):
            pipe.send(Pages(message.number, [self._page()]))
        elif isinstance(message, Pages):
            asked = self._asked.get(message.number)
            if asked is not None and not asked.done():
                asked.set_result(message.texts)

    async def _report(self, pipe: Pipe) -> None:
        told: dict[str, tuple[int, int]] | None = None
        told_at = 0.0
        while True:
            load = self._registry.under_way()
            now = time.monotonic()
            if load != told or now - told_at >= _AT_LEAST_EVERY_S:
                pipe.send(Loads(load))
                told, told_at = load, now
            await asyncio.sleep(_REPORT_S)


def work(plan: Plan, host: str, port: int, end: socket.socket) -> None:
    """Be a worker, until SIGTERM or the parent's end."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it can read its files again
    write_logs(*plan.logs, who=f"[{os.getpid()}] ")
    app = App(plan)
    app.others = Parent(end, app.registry, app.own_metrics, app.reload)
    serve_on(app, bound(host, port, is_shared=True), announce=False)
