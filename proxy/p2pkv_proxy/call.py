"""One client request on its way through the router: what protocols and serving hand each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p2pkv_proxy.prompts import Body, Prompt
from p2pkv_proxy.tracked import Tracked


@dataclass(slots=True)
class Call:
    """A request that was read and understood. ``body`` has no field that only routers may set."""

    path: str
    """``/v1/completions`` and the like; the same at the engines."""
    body: Body
    prompt: Prompt
    headers: list[tuple[bytes, bytes]]
    """For the engines, with names in lower case; without those of the body and the request's id."""
    request_id: str
    method: str = "POST"
    raw: bytes | None = None
    """The body as it goes on, of a request that the router takes no part in."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a request goes. Without a prefill the decode computes the prompt."""

    prefill: Tracked | None
    decode: Tracked
    reason: str
    """For the metrics: the policies' words."""
    detail: str
    """For whoever asks."""


Interrupt = Callable[[Tracked], None]
"""Called when an instance is lost while it has a part of the request."""


class InstanceError(Exception):
    """An instance did not do its part: another one may. ``status`` and ``body`` are what it answered, if it did.

    ``is_fault``: whether it counts against the instance; being busy does not.
    """

    def __init__(
        self, tracked: Tracked, what: str, *, status: int = 502, body: bytes = b"", is_fault: bool = True
    ) -> None:
        super().__init__(f"{tracked.instance.role.value} {tracked.id} {what}")
        self.tracked = tracked
        self.status = status
        self.body = body
        self.is_fault = is_fault


class AnsweredError(Exception):
    """An engine refused the request itself: the client gets its status and body.

    ``tracked``: the instance; None if the router itself knows that none would take it.
    """

    def __init__(self, status: int, content_type: str, body: bytes, tracked: Tracked | None = None) -> None:
        super().__init__(f"status {status}")
        self.tracked = tracked
        self.status = status
        self.content_type = content_type
        self.body = body
