"""The router as an ASGI application: the engines' endpoints, and its own pages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from p2pkv.address import is_loopback
from p2pkv.instances.heartbeat import State
from p2pkv_proxy.access_log import AccessLog
from p2pkv_proxy.bodies import Receive, Scope, Send, error_body
from p2pkv_proxy.call import InstanceError
from p2pkv_proxy.engines import Engines
from p2pkv_proxy.ext_proc import ExtProc
from p2pkv_proxy.holdings import Holdings
from p2pkv_proxy.idle_connections import IDLE, IdleConnections
from p2pkv_proxy.large_bodies import LargeBodies
from p2pkv_proxy.listing import list_all
from p2pkv_proxy.metrics import Metrics, merged
from p2pkv_proxy.neighbourhood import Neighbourhood
from p2pkv_proxy.observer import DirectoryObserver
from p2pkv_proxy.passing import METHODS, PASSED
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.policies import POLICIES
from p2pkv_proxy.probing import probe
from p2pkv_proxy.reading import READERS
from p2pkv_proxy.registry import Event, Registry
from p2pkv_proxy.relaying import Relay
from p2pkv_proxy.reloading import Reloading
from p2pkv_proxy.retry_budget import RetryBudget
from p2pkv_proxy.routing import RefusedError, Router
from p2pkv_proxy.services import Services
from p2pkv_proxy.serving import Serving
from p2pkv_proxy.spans import Spans
from p2pkv_proxy.status_page import FILES, HEADERS, file_at, reading, snapshot
from p2pkv_proxy.tls import ServedCertificate, believed
from p2pkv_proxy.waiting_room import WaitingRoom

_log = logging.getLogger(__name__)
_EXPIRY_S = 0.25
_ASK_S = 5.0
_FOR_ALL = frozenset({"/health", "/healthz"})
"""Balancers ask without a key; the answer says no more than whether there is one who serves."""


class Others(Protocol):
    """The other workers of a router of several."""

    async def run(self) -> None:
        """Hear of them, for ever."""

    async def pages(self) -> list[str]:
        """Return their metrics."""

    def set_draining(self, instance: str, *, to: bool) -> None:
        """Tell them that an instance drains, or no longer does."""


class App:
    """Starlette for the pages; the engines' endpoints are answered before it, since every 10 us counts there."""

    def __init__(self, plan: Plan) -> None:
        """``plan``: with what is in its files (:func:`~p2pkv_proxy.reloading.loaded`)."""
        self._plan = plan
        self._settings = plan.in_force
        self.certificate = ServedCertificate(plan.certificate) if plan.certificate is not None else None
        self.registry = Registry(lifetime=plan.lifetime)
        self._began = int(time.time())
        self.metrics = Metrics(self.registry)
        self._serving: Serving | None = None
        self._services: Services | None = None
        self.reloading = Reloading(plan, self._take, self._note_file)
        """The plan in force, and what is read again of it."""
        self.metrics.refused_files.set_function(lambda: len(self.reloading.refused))
        self.relay: Relay | None = None
        self.neighbourhood: Neighbourhood | None = None
        self.ext_proc: ExtProc | None = None
        self.others: Others | None = None
        """The other workers, if this is one of several."""
        self._pages = Starlette(
            lifespan=self._lifespan,
            routes=[
                *(Route(path, self._file) for path in FILES),
                Route("/router.json", self._reading),
                Route("/healthz", self._healthz),
                Route("/health", self._healthz),
                Route("/metrics", self._metrics),
                Route("/instances", self._instances),
                Route("/instances/{instance}/drain", self._drain, methods=["POST"]),
                Route("/instances/{instance}/resume", self._resume, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/get_model_info", self._model_info),
            ],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the lifespan."""
        is_known = True
        keys = self._plan.api_keys
        if keys is not None and scope["type"] == "http" and scope["path"] not in _FOR_ALL:
            scope["p2pkv.key"] = keys.name_of(scope["headers"])
            is_known = scope["p2pkv.key"] is not None
        if not is_known:
            assert self._serving is not None
            await self._serving.deny(scope, receive, send)
        elif scope["type"] == "http" and self._is_engines(scope):
            assert self._serving is not None
            await self._serving.serve(scope, receive, send)
        else:
            await self._pages(scope, receive, send)

    def _is_engines(self, scope: Scope) -> bool:
        """Whether an engine answers a request."""
        path, method = scope["path"], scope["method"]
        if path in READERS:
            return bool(method == "POST")
        if method not in METHODS:
            return False
        if path in PASSED:
            return True
        return self._settings.pass_unknown and not any(
            route.matches(scope)[0] is not Match.NONE for route in self._pages.routes
        )

    def end_requests(self) -> None:
        """End the requests that are under way; each client is told so."""
        if self._serving is not None:
            self._serving.end()

    @property
    def drain_timeout(self) -> float:
        """Seconds that requests under way have when the router is told to end."""
        return self._settings.drain_timeout

    def reload(self) -> None:
        """Read all files again."""
        if self._services is not None:
            self.reloading.read_all()

    def _take(self, plan: Plan) -> None:
        """Put another plan into force. What is under way goes on by the one that it began with."""
        before, self._plan = self._plan, plan
        services = self._services
        assert services is not None
        if plan.in_force != self._settings:
            self._settings = plan.in_force
            services.take(self._settings)
        services.router.choose_by(*plan.policies)
        services.authorization = plan.authorization
        list_all(self.registry, before.listed, plan.listed)
        if plan.engines_ca != before.engines_ca:
            services.engines.believe(believed(plan.engines_ca))
        if (
            self.certificate is not None
            and plan.certificate is not None
            and plan.certificate != before.certificate
        ):
            self.certificate.serve(plan.certificate)

    def _note_file(self, name: str, what: str, is_taken: bool) -> None:
        self.metrics.reloads.labels(name, "taken" if is_taken else "refused").inc()
        self.registry.events.append(Event(time.time(), f"the file of {name}", what))

    def take_heartbeats(self) -> None:
        """Bind the address of heartbeats, if there is one; they are read once the router serves.

        Before anything is served, so that what is wrong is one sentence to whoever starts the router. Raises
        :class:`~p2pkv.errors.ConfigError` and :class:`~p2pkv.errors.ControlError`.
        """
        if (around := self._plan.around) is not None:
            registry = self.registry
            self.neighbourhood = Neighbourhood(around, registry, registry.under_way, registry.note_replicas)
            _log.info("heartbeats are taken on %s", self.neighbourhood.discovery.address)

    def close(self) -> None:
        """Stop taking heartbeats; for a router that has not begun to serve, which closes this itself. Idempotent."""
        if self.neighbourhood is not None:
            self.neighbourhood.close()

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[dict[str, IdleConnections]]:
        plan = self._plan
        settings = self._settings
        list_all(self.registry, {}, plan.listed)
        engines = Engines(settings, believed(plan.engines_ca))
        router = Router(self.registry, settings, *(POLICIES[name]() for name in plan.policies))
        observer = None
        may_want_holdings = router.wants_holdings or plan.files.settings is not None
        if plan.join and plan.keys is not None and may_want_holdings:
            observer = DirectoryObserver(plan.join, plan.keys)
        holdings = Holdings(self.registry, observer, self.metrics)
        self.relay = relay = Relay()
        self._services = services = Services(
            settings,
            router,
            engines,
            self.metrics,
            holdings,
            relay,
            RetryBudget(),
            WaitingRoom(settings, self.metrics),
            LargeBodies(),
            spans=Spans() if plan.tracing else None,
            authorization=plan.authorization,
        )
        access_log = None
        if plan.access_log is not None:
            access_log = AccessLog(plan.access_log, self.metrics.dropped_lines.inc)
        self._serving = Serving(services, access_log)
        if plan.ext_proc is not None:
            is_shared = plan.n_workers > 1
            self.ext_proc = ExtProc(plan.ext_proc, services, self.certificate, is_shared=is_shared)
            await self.ext_proc.start()
        tasks = [asyncio.ensure_future(_forever(work)) for work in self._work(engines)]
        try:
            yield {IDLE: IdleConnections(self.metrics.ended_idle.inc)}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.ext_proc is not None:
                await self.ext_proc.close()
            self.close()
            holdings.close()
            services.large_bodies.close()
            relay.close()
            engines.close()
            if access_log is not None:
                access_log.close()

    def _work(self, engines: Engines) -> list[Coroutine[object, object, None]]:
        """Return what runs beside the requests."""
        assert self._serving is not None
        work: list[Coroutine[object, object, None]] = [
            self._serving.sweep(),
            probe(self.registry, engines),
            self._expire(),
        ]
        if self.neighbourhood is not None:
            work += self.neighbourhood.work()
        if self.others is not None:
            work.append(self.others.run())
        if self.reloading.names:
            work.append(self.reloading.follow())
        return work

    async def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _EXPIRY_S
            await asyncio.sleep(_EXPIRY_S)
            self.registry.expire(max(0.0, loop.time() - due))

    async def _file(self, request: Request) -> Response:
        body, kind = file_at(request.url.path)
        return Response(body, media_type=kind, headers=HEADERS)

    async def _reading(self, request: Request) -> Response:
        assert self._serving is not None
        n_workers = self._plan.n_workers
        shown = reading(self.registry, in_flight=self._serving.in_flight, n_workers=n_workers)
        return JSONResponse(shown, headers=HEADERS)

    async def _healthz(self, request: Request) -> Response:
        """200 while requests can be answered; what a load balancer asks."""
        ready = [t for t in self.registry if t.state is State.READY]
        roles = sorted({tracked.instance.role.value for tracked in ready})
        can_serve = self.registry.can_serve(strict_pd=self._plan.settings.strict_pd)
        return JSONResponse({"ready": can_serve, "roles": roles}, status_code=200 if can_serve else 503)

    async def _metrics(self, request: Request) -> Response:
        """Of all workers, whichever was asked."""
        pages = [self.own_metrics()]
        if self.others is not None:
            pages += await self.others.pages()
        return Response(merged(pages) if len(pages) > 1 else pages[0], media_type=CONTENT_TYPE_LATEST)

    def own_metrics(self) -> str:
        """Return this process's metrics, as Prometheus reads them."""
        return generate_latest(self.metrics.registry).decode()

    async def _instances(self, request: Request) -> Response:
        return JSONResponse(snapshot(self.registry))

    async def _drain(self, request: Request) -> Response:
        return self._set_draining(request, to=True)

    async def _resume(self, request: Request) -> Response:
        return self._set_draining(request, to=False)

    def _set_draining(self, request: Request, *, to: bool) -> Response:
        if not _is_own_hosts(request):
            error = error_body(
                403,
                "instances are drained from the router's own host only, at 127.0.0.1 or localhost, and by no web page",
            )
            return Response(error, 403, media_type="application/json")
        name = request.path_params["instance"]
        tracked = self.registry.get(name)
        if tracked is None:
            return Response(error_body(404, f"no instance {name!r}"), 404, media_type="application/json")
        self.registry.set_draining(name, to=to)
        if self.others is not None:
            self.others.set_draining(name, to=to)
        return JSONResponse({"id": tracked.id, "state": tracked.state.value, "in_flight": tracked.in_flight})

    async def _models(self, request: Request) -> Response:
        """The models of all instances; those that don't name theirs are asked."""
        names = {tracked.instance.model for tracked in self.registry if tracked.instance.model}
        if names:
            models = [
                {"id": name, "object": "model", "created": self._began, "owned_by": "p2pkv"}
                for name in sorted(names)
            ]
            return JSONResponse({"object": "list", "data": models})
        return await self._ask("/v1/models", request)

    async def _model_info(self, request: Request) -> Response:
        return await self._ask("/get_model_info", request)

    async def _ask(self, path: str, request: Request) -> Response:
        """Pass on the first answer of an instance that is ready; it is told the key that is for engines."""
        assert self._services is not None
        authorization = self._services.authorization
        if authorization is None:
            headers = [header for header in request.headers.raw if header[0] == b"authorization"]
        else:
            headers = [(b"authorization", authorization)] if authorization else []
        for tracked in [tracked for tracked in self.registry if tracked.state is State.READY]:
            try:
                status, content_type, body = await self._services.engines.get(tracked, path, _ASK_S, headers)
            except InstanceError:
                continue
            return Response(body, status, media_type=content_type)
        error = RefusedError(503, "no instance is ready")
        return Response(error_body(503, str(error)), 503, media_type="application/json")


def _is_own_hosts(request: Request) -> bool:
    """Whether a program of this host asks: a browser on it may be had to ask as well, by a page on the web."""
    if request.client is None or not is_loopback(request.client.host) or "origin" in request.headers:
        return False
    host = request.headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return is_loopback(name)  # another one may mean loopback for as long as it is of use to that page


async def _forever(work: Coroutine[object, object, None]) -> None:
    """Run one of the router's own tasks; without it the router is blind, so it ends with it."""
    try:
        await work
    except Exception:  # noqa: BLE001 - the top of a task
        _log.exception("a task of the router has failed; the router ends")
        raise SystemExit(1) from None
