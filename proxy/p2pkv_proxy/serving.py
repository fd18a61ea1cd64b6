"""The requests under way: who is let in, and what ends those that wait for too long."""

from __future__ import annotations

import asyncio
import time

from p2pkv_proxy.access_log import AccessLog, Entry, came_at, shortened, trace_id_of
from p2pkv_proxy.bodies import Receive, Scope, Send
from p2pkv_proxy.cutting import Cut
from p2pkv_proxy.exchange import Exchange
from p2pkv_proxy.metrics import FAULTS
from p2pkv_proxy.routing import RefusedError
from p2pkv_proxy.services import Services

_SWEEP_S = 0.1


class Serving:
    """The requests under way. :meth:`sweep` must run beside them: it keeps their deadlines."""

    def __init__(self, services: Services, access_log: AccessLog | None = None) -> None:
        self._services = services
        services.metrics.waiting.set_function(lambda: len(services.waiting_room))
        self._access_log = access_log
        self._exchanges: set[Exchange] = set()
        self._refused: set[Exchange] = set()

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return len(self._exchanges)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = Exchange(self._services, scope, receive, send)
        if len(self._exchanges) >= self._services.settings.max_in_flight:
            await self._refuse(
                exchange, "refused", RefusedError(429, "the router has as many requests as it may", 1)
            )
            return
        self._exchanges.add(exchange)
        try:
            outcome = await exchange.run()
        finally:
            self._exchanges.discard(exchange)
            self._services.waiting_room.wake()
        self._note(exchange, outcome)
        self._services.metrics.duration.observe(time.monotonic() - exchange.began)

    async def deny(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has no key, or a wrong one; nothing of its body is read."""
        refusal = RefusedError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")
        await self._refuse(Exchange(self._services, scope, receive, send), "denied", refusal)

    async def _refuse(self, exchange: Exchange, outcome: str, error: RefusedError) -> None:
        self._note(exchange, outcome)
        self._refused.add(exchange)
        try:
            await exchange.words.refuse(error)
        finally:
            self._refused.discard(exchange)

    def _note(self, exchange: Exchange, outcome: str) -> None:
        """Count a request, and tell of it."""
        self._services.metrics.requests.labels(outcome).inc()
        if exchange.span is not None:
            request_id = exchange.call.request_id if exchange.call is not None else None
            exchange.span.end(outcome, is_error=outcome in FAULTS, request_id=request_id)
        if self._access_log is not None:
            self._access_log.write(entry_of(exchange, outcome))

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
            self._services.waiting_room.wake()  # an instance may have room for other reasons


def entry_of(exchange: Exchange, outcome: str) -> Entry:
    """Return what the access log says of a request that has ended."""
    scope, call, pair = exchange.scope, exchange.call, exchange.pair
    return Entry(
        at=came_at(exchange.began),
        request_id=call.request_id if call is not None else None,
        trace_id=trace_id_of(scope["headers"])
        or (exchange.span.trace_id if exchange.span is not None else None),
        key=scope.get("p2pkv.key"),
        method=scope["method"],
        path=shortened(scope["path"]) or "",
        model=shortened(call.prompt.model) if call is not None else None,
        is_stream=call.prompt.is_stream if call is not None else None,
        outcome=outcome,
        prefill=pair.prefill.id if pair is not None and pair.prefill is not None else None,
        decode=pair.decode.id if pair is not None else None,
        reason=pair.reason if pair is not None else None,
        attempts=exchange.n_attempts,
        resumed=exchange.answering.n_resumed,
        prompt_tokens=call.prompt.n_tokens if call is not None else None,
        first_byte_seconds=_rounded(exchange.answering.first_byte_after),
        seconds=round(time.monotonic() - exchange.began, 6),
    )


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 6) if seconds is not None else None
