"""The router as an ASGI application: the engines' endpoints, and its own pages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from p2pkv.address import is_loopback
from p2pkv.control.secret import ClusterKeys
from p2pkv.instances.heartbeat import Instance, State
from p2pkv_proxy.access_log import AccessLog
from p2pkv_proxy.api_keys import read_api_keys
from p2pkv_proxy.bodies import Receive, Scope, Send, error_body
from p2pkv_proxy.call import InstanceError
from p2pkv_proxy.engines import Engines
from p2pkv_proxy.ext_proc import ExtProc
from p2pkv_proxy.holdings import Holdings
from p2pkv_proxy.listing import follow_file
from p2pkv_proxy.metrics import Metrics, merged
from p2pkv_proxy.neighbourhood import Around, Neighbourhood
from p2pkv_proxy.observer import DirectoryObserver
from p2pkv_proxy.passing import METHODS, PASSED
from p2pkv_proxy.policies import POLICIES
from p2pkv_proxy.probing import probe
from p2pkv_proxy.reading import READERS
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.relaying import Relay
from p2pkv_proxy.retry_budget import RetryBudget
from p2pkv_proxy.routing import RefusedError, Router
from p2pkv_proxy.services import Services
from p2pkv_proxy.serving import Serving
from p2pkv_proxy.settings import Settings
from p2pkv_proxy.spans import Spans
from p2pkv_proxy.status_page import FILES, HEADERS, file_at, reading, snapshot
from p2pkv_proxy.tls import Certificate, ServedCertificate, believed
from p2pkv_proxy.waiting_room import WaitingRoom

_log = logging.getLogger(__name__)
_EXPIRY_S = 0.25
_ASK_S = 5.0
_FOR_ALL = frozenset({"/health", "/healthz"})
"""Balancers ask without a key; the answer says no more than whether there is one who serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command line asks for."""

    settings: Settings
    prefill_policy: str = "prefix"
    decode_policy: str = "least_loaded"
    instances: tuple[Instance, ...] = ()
    instances_file: Path | None = None
    file_instances: tuple[Instance, ...] = ()
    heartbeats: str | None = None
    """``HOST:PORT`` to take heartbeats on; None takes none."""
    lifetime: float = 10.0
    join: tuple[str, ...] = ()
    keys: ClusterKeys | None = None
    has_own_secret: bool = True
    api_keys_file: Path | None = None
    """Who may use the router; without it, and without any in the environment, everybody may."""
    certificate: Certificate | None = None
    """For TLS; without it clients speak plain HTTP."""
    engines_ca: Path | None = None
    """Authorities whose certificates are believed of engines with https; None: the system's."""
    engines_key: bytes | None = field(default=None, repr=False)
    """What engines are told instead of the client's key."""
    access_log: str | None = None
    """The file to write a line to for each request; ``-``: stdout."""
    tracing: bool = False
    """Requests have spans of OpenTelemetry."""
    n_workers: int = 1
    """Processes that serve the port, of which this is one."""
    ext_proc: str | None = None
    """``HOST:PORT`` to answer Envoy on; None: nowhere."""
    replicas: tuple[str, ...] = ()
    """Heartbeat addresses of routers beside this one; those that engines or nodes know need not be named."""
    advertise: str = ""
    """The host that engines and other routers reach this one by; empty: what it listens on."""

    @property
    def around(self) -> Around | None:
        """What is known of others; None where nobody is listened to."""
        if self.heartbeats is None or self.keys is None:
            return None
        return Around(
            heartbeats=self.heartbeats,
            keys=self.keys,
            has_own_secret=self.has_own_secret,
            join=self.join,
            replicas=self.replicas,
            advertise=self.advertise,
        )


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
        self._plan = plan
        self._keys = read_api_keys(plan.api_keys_file)
        self.certificate = ServedCertificate(plan.certificate) if plan.certificate is not None else None
        self._authorization: bytes | None = None
        if plan.engines_key is not None:
            self._authorization = b"Bearer " + plan.engines_key
        elif self._keys is not None:
            self._authorization = b""
        self.registry = Registry(lifetime=plan.lifetime)
        self._began = int(time.time())
        self.metrics = Metrics(self.registry)
        self._serving: Serving | None = None
        self._engines: Engines | None = None
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
        if self._keys is not None and scope["type"] == "http" and scope["path"] not in _FOR_ALL:
            scope["p2pkv.key"] = self._keys.name_of(scope["headers"])
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
        return self._plan.settings.pass_unknown and not any(
            route.matches(scope)[0] is not Match.NONE for route in self._pages.routes
        )

    def end_requests(self) -> None:
        """End the requests that are under way; each client is told so."""
        if self._serving is not None:
            self._serving.end()

    @property
    def drain_timeout(self) -> float:
        """Seconds that requests under way have when the router is told to end."""
        return self._plan.settings.drain_timeout

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
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        plan = self._plan
        for instance in (*plan.instances, *plan.file_instances):
            self.registry.list_instance(instance)
        self._engines = engines = Engines(plan.settings, believed(plan.engines_ca))
        router = Router(
            self.registry, plan.settings, POLICIES[plan.prefill_policy](), POLICIES[plan.decode_policy]()
        )
        observer = None
        if plan.join and plan.keys is not None and router.wants_holdings:
            observer = DirectoryObserver(plan.join, plan.keys)
        holdings = Holdings(self.registry, observer, self.metrics)
        self.relay = relay = Relay()
        services = Services(
            plan.settings,
            router,
            engines,
            self.metrics,
            holdings,
            relay,
            RetryBudget(),
            WaitingRoom(plan.settings, self.metrics),
            spans=Spans() if plan.tracing else None,
            authorization=self._authorization,
        )
        access_log = None
        if plan.access_log is not None:
            access_log = AccessLog(plan.access_log, self.metrics.dropped_lines.inc)
        self._serving = Serving(services, access_log)
        if plan.ext_proc is not None:
            is_shared = plan.n_workers > 1
            self.ext_proc = ExtProc(plan.ext_proc, services, plan.certificate, is_shared=is_shared)
            await self.ext_proc.start()
        tasks = [asyncio.ensure_future(_forever(work)) for work in self._work(engines)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.ext_proc is not None:
                await self.ext_proc.close()
            self.close()
            holdings.close()
            relay.close()
            engines.close()
            if access_log is not None:
                access_log.close()

    def _work(self, engines: Engines) -> list[Coroutine[object, object, None]]:
        """Return what runs beside the requests."""
        plan = self._plan
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
        if self._keys is not None:
            work.append(self._keys.follow())
        if self.certificate is not None:
            work.append(self.certificate.follow())
        if plan.instances_file is not None:
            work.append(follow_file(plan.instances_file, plan.file_instances, self.registry))
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
        can_serve = any(role != "prefill" for role in roles)
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
        if request.client is None or not is_loopback(request.client.host):
            error = error_body(403, "instances are drained from the router's own host only")
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
        assert self._engines is not None
        if self._authorization is None:
            headers = [header for header in request.headers.raw if header[0] == b"authorization"]
        else:
            headers = [(b"authorization", self._authorization)] if self._authorization else []
        for tracked in [tracked for tracked in self.registry if tracked.state is State.READY]:
            try:
                status, content_type, body = await self._engines.get(tracked, path, _ASK_S, headers)
            except InstanceError:
                continue
            return Response(body, status, media_type=content_type)
        error = RefusedError(503, "no instance is ready")
        return Response(error_body(503, str(error)), 503, media_type="application/json")


async def _forever(work: Coroutine[object, object, None]) -> None:
    """Run one of the router's own tasks; without it the router is blind, so it ends with it."""
    try:
        await work
    except Exception:  # noqa: BLE001 - the top of a task
        _log.exception("a task of the router has failed; the router ends")
        raise SystemExit(1) from None
