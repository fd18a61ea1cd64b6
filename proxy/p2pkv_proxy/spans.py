"""Spans of OpenTelemetry: one for each request, a child of the client's, and one for each attempt, the engines' parent.

Only the API is used (``opentelemetry-api``): who wants the spans somewhere sets up a provider, as
``opentelemetry-instrument p2pkv-proxy --tracing`` does, in each worker too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from typing import Any

from p2pkv.errors import ConfigError
from p2pkv_proxy.bodies import Scope
from p2pkv_proxy.call import Call, Pair

_CARRIED = frozenset({b"traceparent", b"tracestate"})


class Spans:
    """Makes the spans of a router. Raises :class:`ConfigError` without ``opentelemetry-api``."""

    def __init__(self) -> None:
        try:
            self._api: Any = import_module("opentelemetry.trace")
            carried = import_module("opentelemetry.trace.propagation.tracecontext")
        except ModuleNotFoundError as error:
            raise ConfigError(
                "--tracing needs opentelemetry-api, which is not installed: pip install 'p2pkv[tracing]'"
            ) from error
        self._propagator: Any = carried.TraceContextTextMapPropagator()
        # finds the provider when the first span is made: it may be set up later
        self._tracer: Any = self._api.get_tracer("p2pkv-proxy", version("p2pkv"))

    def begin(self, scope: Scope) -> RequestSpan:
        """Begin the span of a request, in the client's trace if it has one."""
        carrier = {
            name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _CARRIED
        }
        context = self._propagator.extract(carrier)
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"][:200]}
        span = self._tracer.start_span(
            "p2pkv-proxy request", context, kind=self._api.SpanKind.SERVER, attributes=attributes
        )
        return RequestSpan(self._api, self._tracer, self._propagator, span)


class RequestSpan:
    """One request's. It must be ended."""

    def __init__(self, api: Any, tracer: Any, propagator: Any, span: Any) -> None:
        self._api = api
        self._tracer = tracer
        self._propagator = propagator
        self._span = span

    @property
    def trace_id(self) -> str | None:
        """The id of the trace that it is in, in hexadecimal; None if nobody keeps it."""
        context = self._span.get_span_context()
        return f"{context.trace_id:032x}" if context.is_valid else None

    @contextmanager
    def attempt(self, call: Call, pair: Pair, number: int) -> Iterator[Call]:
        """Have a span for one attempt; yield the call as engines must get it to have theirs in it."""
        attributes = {
            "p2pkv.decode": pair.decode.id,
            "p2pkv.prefill": pair.prefill.id if pair.prefill is not None else "",
            "p2pkv.reason": pair.reason,
            "p2pkv.attempt": number + 1,
        }
        above = self._api.set_span_in_context(self._span)
        kind = self._api.SpanKind.CLIENT
        with self._tracer.start_as_current_span(
            "p2pkv-proxy attempt", above, kind=kind, attributes=attributes
        ) as span:
            if not span.get_span_context().is_valid:
                yield call
                return
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier, self._api.set_span_in_context(span))
            kept = [header for header in call.headers if header[0] not in _CARRIED]
            yield replace(call, headers=[*kept, *((k.encode(), v.encode()) for k, v in carrier.items())])

    def end(self, outcome: str, *, is_error: bool, request_id: str | None) -> None:
        """End it."""
        self._span.set_attribute("p2pkv.outcome", outcome)
        if request_id is not None:
            self._span.set_attribute("p2pkv.request", request_id)
        if is_error:
            self._span.set_status(self._api.StatusCode.ERROR, outcome)
        self._span.end()
