"""One request of an Envoy that asks where it should go: what is read of it, who is picked, and what is counted of it.

The Gateway API inference extension's endpoint picker protocol: Envoy's ext_proc filter says what a request has, its
answer names the endpoint in a header and in metadata, and Envoy itself passes the bytes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from p2pkv.instances.heartbeat import Role
from p2pkv_proxy.bodies import error_body
from p2pkv_proxy.call import Pair
from p2pkv_proxy.costs import work_of
from p2pkv_proxy.prompts import MalformedError, Prompt
from p2pkv_proxy.reading import READERS, read_call
from p2pkv_proxy.routing import RefusedError
from p2pkv_proxy.services import Services
from p2pkv_proxy.tracked import Attempt, Tracked

_log = logging.getLogger(__name__)

DESTINATION = "x-gateway-destination-endpoint"
"""The header, and the key in the metadata ``envoy.lb``, that name who is picked."""
PREFILLER = "x-prefiller-host-port"
"""The header that tells the routing sidecar of llm-d's decodes which prefill to ask first."""
_MOST_HEADERS = 256
_MOST_CANDIDATES = 4096


@dataclass(frozen=True, slots=True)
class Picked:
    """Who was picked: the headers that say so."""

    destination: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Refused:
    """What the client gets instead."""

    status: int
    body: bytes
    retry_after: int | None = None


class _Phase(Enum):
    READING = "reading"
    SENT = "sent"
    ANSWERED = "answered"
    ENDED = "ended"


class Picking:
    """One request, from its headers to the end of its answer. Nothing here waits but :meth:`pick`.

    :meth:`end` must be called in the end, whatever happened.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._path = ""
        self._headers: list[tuple[bytes, bytes]] = []
        self._only: frozenset[str] | None = None
        self._chunks: list[bytes] = []
        self._nbytes = 0
        self._phase = _Phase.READING
        self._attempts: list[tuple[Tracked, Attempt]] = []
        self._began = time.monotonic()
        self._outcome = "client_gone"

    @property
    def is_read(self) -> bool:
        """Whether somebody was picked, or nobody can be."""
        return self._phase is not _Phase.READING

    def head(self, headers: Sequence[tuple[str, bytes]], only: Sequence[str] = ()) -> None:
        """Take the request's headers, and which endpoints (``HOST:PORT``) may be picked; none: all."""
        self._only = frozenset(only[:_MOST_CANDIDATES]) if only else None
        for name, value in headers[:_MOST_HEADERS]:
            if name == ":path":
                self._path = value.decode("latin-1").partition("?")[0]
            elif not name.startswith(":"):
                self._headers.append((name.lower().encode("latin-1", "replace"), value))

    def body(self, chunk: bytes) -> Refused | None:
        """Take a piece of the request's body; a refusal if it is more than may be."""
        self._nbytes += len(chunk)
        if self._nbytes > self._services.settings.max_body:
            self._chunks.clear()
            most = self._services.settings.max_body
            return self._refused("client_error", 413, f"the body has more than {most} bytes")
        self._chunks.append(chunk)
        return None

    async def pick(self) -> Picked | Refused:
        """Choose, once all of the request is there; its load counts from now on."""
        services = self._services
        try:
            prompt = self._read()
            if services.router.wants_holdings and prompt.parts:
                await services.holdings.look_up(prompt)
            pair = services.router.choose(prompt, self._path, only=self._allowed())
        except MalformedError as error:
            return self._refused("client_error", 400, str(error))
        except RefusedError as error:
            outcome = "client_error" if error.status == 404 else "refused"
            return self._refused(outcome, error.status, str(error), error.retry_after)
        services.metrics.choices.labels(pair.reason).inc()
        services.metrics.chose(pair.prefill.id if pair.prefill else "", pair.decode.id)
        self._begin(prompt, pair)
        headers = {DESTINATION: _endpoint(pair.decode)}
        if pair.prefill is not None:
            headers[PREFILLER] = _endpoint(pair.prefill)
        return Picked(headers[DESTINATION], headers)

    def late(self) -> Refused:
        """Return what the client is told whose body is not there in time."""
        return self._refused("timed_out", 408, "the body did not arrive in time")

    def answered(self, status: int) -> None:
        """Take the answer's status: its first byte is there."""
        if self._phase is not _Phase.SENT:
            return
        now = time.monotonic()
        for tracked, attempt in self._attempts:
            tracked.answered(attempt, now)
        self._services.metrics.first_byte.observe(now - self._began)
        self._phase = _Phase.ANSWERED
        if status >= 500:
            self._finish("engine_error", is_failed=True)
        elif status >= 400:
            self._outcome = "client_error"
        else:
            self._outcome = "ok"

    def completed(self) -> None:
        """Note that the whole answer has passed."""
        if self._phase is _Phase.ANSWERED:
            now = time.monotonic()
            for tracked, attempt in self._attempts:
                tracked.completed(attempt, now)
            self._finish(self._outcome)

    def end(self) -> None:
        """Count the request out: Envoy has said all that it says of it. Idempotent."""
        self._finish(self._outcome)

    def _read(self) -> Prompt:
        raw = b"".join(self._chunks)
        self._chunks.clear()
        if self._path not in READERS:
            return Prompt("", [], None, is_stream=False, max_tokens=0)
        return read_call({"path": self._path, "headers": self._headers}, raw).prompt

    def _allowed(self) -> set[str] | None:
        """Return the ids of those that Envoy lets this picker choose from."""
        if self._only is None:
            return None
        return {t.id for t in self._services.router.instances() if _endpoint(t) in self._only}

    def _begin(self, prompt: Prompt, pair: Pair) -> None:
        now = time.monotonic()
        self._phase = _Phase.SENT
        for tracked in (pair.prefill, pair.decode):
            if tracked is None:
                continue
            work = None
            if tracked.instance.role is not Role.DECODE:
                work = work_of(prompt, tracked.id, tracked.instance.node_id)
            is_prefill = tracked is pair.prefill
            n_tokens = prompt.n_to_compute + 1 if is_prefill else prompt.n_tokens + prompt.max_tokens
            attempt = tracked.begin(
                n_tokens,
                now,
                lambda: None,  # the request is Envoy's to send elsewhere
                is_prompt=is_prefill or prompt.is_stream,
                n_prompt=prompt.n_tokens,
                work=work,
            )
            self._attempts.append((tracked, attempt))

    def _refused(self, outcome: str, status: int, message: str, retry_after: int | None = None) -> Refused:
        self._finish(outcome)
        return Refused(status, error_body(status, message), retry_after)

    def _finish(self, outcome: str, *, is_failed: bool = False) -> None:
        if self._phase is _Phase.ENDED:
            return
        self._phase = _Phase.ENDED
        now = time.monotonic()
        for tracked, attempt in self._attempts:
            # Envoy names one status for both, and only the decode has given it
            tracked.end(attempt, now, failed=is_failed and tracked is self._attempts[-1][0])
        self._attempts.clear()
        self._services.metrics.requests.labels(outcome).inc()
        self._services.metrics.duration.observe(now - self._began)


def _endpoint(tracked: Tracked) -> str:
    """Return ``HOST:PORT`` of an instance, as Envoy takes it."""
    scheme, _, address = tracked.instance.url.partition("://")
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        host, port = address, "443" if scheme == "https" else "80"
    return f"{host}:{port}"
