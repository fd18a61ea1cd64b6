"""Spans of OpenTelemetry over what takes time: publishes, look-ups, reads, promotions, hand-offs.

Only the API is used (``opentelemetry-api``): who wants the spans somewhere sets up a provider, as the engine does, or
``opentelemetry-instrument p2pkv node``. Calls are wrapped when a node is made, and only with the setting ``tracing``:
without it there is nothing to ask on the way.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from p2pkv.errors import ConfigError

_REQUESTS: ContextVar[tuple[str, ...]] = ContextVar("p2pkv_requests", default=())

Call = Callable[..., Any]
Watch = Callable[[str], Callable[[Mapping[str, str]], None] | None]
Heard = Callable[[Sequence[str], str, Any, Any, float], None]
"""Takes requests, the name of a call for them, its keys, their outcomes, and how many seconds it took."""


class Traced(NamedTuple):
    """How one method shows in spans."""

    span: str
    given: Callable[[Sequence[Any], Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Makes attributes of its arguments, whatever they are."""
    outcomes: Callable[[Any], Any] | None = None
    """Finds in what it returned which of the pages that it is about are hits."""


def _argument(arguments: Sequence[Any], named: Mapping[str, Any], index: int, name: str) -> Any:
    """Return an argument, None if it was not given: what is wrong with a call is for the method itself to say."""
    return arguments[index] if len(arguments) > index else named.get(name)


def _pages_of(arguments: Sequence[Any], named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Say how many pages a call is about."""
    keys = _argument(arguments, named, 0, "keys")
    return {"p2pkv.pages": len(keys)} if isinstance(keys, Sized) else {}


def _transfer_of(arguments: Sequence[Any], named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Say what both sides call a transfer, which names its request unless the caller does."""
    name = str(_argument(arguments, named, 0, "request"))
    return {"p2pkv.offer": name, "p2pkv.request": name}


def _transfer_with(arguments: Sequence[Any], named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name the other node too."""
    peer = str(_argument(arguments, named, 0, "node_id"))
    return {"p2pkv.peer": peer, **_transfer_of(arguments[1:], named)}


def _itself(outcomes: Any) -> Any:
    return outcomes


def _found(whereabouts: Any) -> Any:
    return whereabouts.outcomes


CALLS = {
    "publish": Traced("publish", _pages_of, _itself),
    "fetch": Traced("fetch", _pages_of, _itself),
    "exists": Traced("exists", _pages_of, _itself),
    "whereabouts": Traced("whereabouts", _pages_of, _found),
    "retract": Traced("retract", _pages_of, _itself),
}
STEPS = {
    "_locate": Traced("look_up"),
    "_promote": Traced("promote"),
    "_read": Traced("read"),
}
"""A fetch has these within it, unless all of it was found without: then it is one call."""

TRANSFERS = {
    "offer": Traced("offer", _transfer_of),
    "put": Traced("put", _transfer_with),
    "put_async": Traced("put_async", _transfer_with),
    "grant": Traced("grant", _transfer_of),
    "receive": Traced("receive", _transfer_of),
    "get": Traced("get", _transfer_with),
    "get_async": Traced("get_async", _transfer_with),
}
"""The first three are of prefill's side, the others of decode's. Those that don't wait end before rows have come."""


@contextlib.contextmanager
def about(*requests: str) -> Iterator[None]:
    """Let spans of this thread say that they are about the engine's requests of these ids.

    One is their ``p2pkv.request``, and exemplars name it. Several, of which one call is, are their ``p2pkv.requests``,
    and no exemplar names any of them.
    """
    token = _REQUESTS.set(requests)
    try:
        yield
    finally:
        _REQUESTS.reset(token)


def _asked_for(requests: tuple[str, ...]) -> Mapping[str, Any]:
    return {"p2pkv.request": requests[0]} if len(requests) == 1 else {"p2pkv.requests": requests}


class Spans:
    """Makes the spans of one node, all of which say ``attributes``.

    ``watch`` is told the name of each call that is made for one request (:func:`about`); what it returns, if anything,
    is told when the call has ended which request and which trace that was. ``heard`` is told of each call
    about pages that was made for requests.

    Raises :class:`~p2pkv.errors.ConfigError` without ``opentelemetry-api``.
    """

    def __init__(
        self,
        attributes: Mapping[str, str],
        watch: Watch = lambda _: None,
        heard: Heard = lambda *_: None,
    ) -> None:
        try:
            api = import_module("opentelemetry.trace")
        except ModuleNotFoundError as error:
            raise ConfigError(
                "tracing needs opentelemetry-api, which is not installed: pip install 'p2pkv[tracing]'"
            ) from error
        # finds the provider when the first span is made: it may be set up after the node
        self._tracer = api.get_tracer("p2pkv", import_module("importlib.metadata").version("p2pkv"))
        self._attributes = attributes
        self._watch = watch
        self._heard = heard

    def trace(self, target: object, calls: Mapping[str, Traced]) -> None:
        """Have a span for each call of these methods of ``target``, a child of the caller's current one.

        What a method raises is recorded in its span, and raised.
        """
        for name, call in calls.items():
            setattr(target, name, self._wrapped(getattr(target, name), call))

    def _wrapped(self, method: Call, call: Traced) -> Call:
        @functools.wraps(method)
        def traced(*arguments: Any, **named: Any) -> Any:
            name = f"p2pkv.{call.span}"
            requests = _REQUESTS.get()
            note = self._watch(call.span) if len(requests) == 1 else None
            with self._tracer.start_as_current_span(name, attributes=self._attributes) as span:
                is_recording = span.is_recording()
                if is_recording and call.given is not None:
                    span.set_attributes(call.given(arguments, named))
                if is_recording and requests:
                    span.set_attributes(_asked_for(requests))
                began = time.monotonic()
                result = method(*arguments, **named)
                if call.outcomes is not None:
                    outcomes = call.outcomes(result)
                    if is_recording:
                        span.set_attribute("p2pkv.hits", int(np.count_nonzero(outcomes)))
                    if requests:
                        keys = _argument(arguments, named, 0, "keys")
                        self._heard(requests, call.span, keys, outcomes, time.monotonic() - began)
                if note is not None:
                    labels = {"request_id": requests[0]}
                    if is_recording:
                        labels["trace_id"] = f"{span.get_span_context().trace_id:032x}"
                    note(labels)
                return result

        return traced
