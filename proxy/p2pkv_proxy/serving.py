"""The requests under way: who is let in, and what ends those that wait for too long."""

from __future__ import annotations

import asyncio
import time

from p2pkv_proxy.bodies import Receive, Scope, Send
from p2pkv_proxy.exchange import Cut, Exchange, Services
from p2pkv_proxy.routing import RefusedError

_SWEEP_S = 0.1


class Serving:
    """The requests under way. :meth:`sweep` must run beside them: it keeps their deadlines."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._exchanges: set[Exchange] = set()
        self._refused: set[Exchange] = set()

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return len(self._exchanges)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = Exchange(self._services, scope, receive, send)
        metrics = self._services.metrics
        if len(self._exchanges) >= self._services.settings.max_in_flight:
            metrics.requests.labels("refused").inc()
            await self._refuse(exchange, RefusedError(429, "the router has as many requests as it may", 1))
            return
        self._exchanges.add(exchange)
        try:
            outcome = await exchange.run()
        finally:
            self._exchanges.discard(exchange)
        metrics.requests.labels(outcome).inc()
        metrics.duration.observe(time.monotonic() - exchange.began)

    async def deny(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has no key, or a wrong one; nothing of its body is read."""
        self._services.metrics.requests.labels("denied").inc()
        refusal = RefusedError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")
        await self._refuse(Exchange(self._services, scope, receive, send), refusal)

    async def _refuse(self, exchange: Exchange, error: RefusedError) -> None:
        self._refused.add(exchange)
        try:
            await exchange.refuse(error)
        finally:
            self._refused.discard(exchange)

    def end(self) -> None:
        """End all requests: those whose answers have begun are told that these broke off."""
        for exchange in (*self._exchanges, *self._refused):
            exchange.cut(Cut.ROUTER_ENDS)

    async def sweep(self) -> None:
        """End waits that are over, for ever."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            for exchange in (*self._exchanges, *self._refused):
                exchange.check(now)
