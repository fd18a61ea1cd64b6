"""KV hints: what an orchestrator asks of caches with a request, in the envelope that vLLM and SGLang carry.

The envelope is the engines': ``{protocol_version, message_id, actions: [{action_id, action_type, action_version,
payload}]}``. What is in a payload is left to whoever acts on it; ``docs/prefetch.md`` says what is understood here. A
hint is advice: an action that can't be followed is left out and said so, and the others are followed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from p2pkv.errors import UsageError
from p2pkv.message_types import worked_out

MAX_ACTIONS, MAX_PARTS, MAX_TARGETS = 64, 64, 16
"""Of an envelope, of a retention, of a share; what is beyond is left out."""
MAX_RETAINED_S = 86400.0
_KNOWN_MAJORS = ("0", "1")


class _Action(msgspec.Struct, frozen=True):
    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any] = {}


@worked_out
class _Envelope(msgspec.Struct, frozen=True):
    protocol_version: str
    message_id: str
    actions: list[_Action] = []


@dataclass(frozen=True, slots=True)
class Retain:
    """Keep the KV of some of a request's tokens, once it has finished."""

    first: int
    last: int | None
    """The token behind the last one; None: to the end of the output."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Hints:
    """What is to be done with a request's KV."""

    brings: bool = False
    """What others have of its prompt is to come here, as soon as the request is known."""
    retains: tuple[Retain, ...] = ()
    shares: tuple[str, ...] = ()
    """The ids of the nodes that are to have it as well, once the request has finished."""
    lets_go: bool = False
    """It is not wanted any more once the request has finished: what was retained of it is released."""
    ignored: tuple[str, ...] = ()
    """Why actions were left out, one text each."""

    def __bool__(self) -> bool:
        return self.brings or bool(self.retains) or bool(self.shares) or self.lets_go


def read_hints(envelope: object) -> Hints:
    """Read an envelope, a mapping or an engine's own object.

    Raises :class:`~p2pkv.errors.UsageError` for what is no envelope.
    """
    try:
        read = msgspec.convert(envelope, _Envelope, from_attributes=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"these KV hints are no envelope of them: {error}") from error
    if _major(read.protocol_version) not in _KNOWN_MAJORS:
        return Hints(ignored=(f"protocol version {read.protocol_version!r} is not known here",))
    brings = lets_go = False
    retains: list[Retain] = []
    shares: list[str] = []
    ignored = [f"more than {MAX_ACTIONS} actions"] if len(read.actions) > MAX_ACTIONS else []
    for action in read.actions[:MAX_ACTIONS]:
        try:
            if _major(action.action_version) not in _KNOWN_MAJORS:
                raise UsageError(f"version {action.action_version!r} is not known here")
            match action.action_type:
                case "kv.fetch" | "kv.prefetch":
                    brings = True
                case "kv.retain" | "kv.pin":
                    retains += _retains(action.payload)
                case "kv.share":
                    shares += _targets(action.payload)
                case "kv.demote" | "kv.evict":
                    lets_go = True
                case _:
                    raise UsageError("is not known here")
        except UsageError as error:
            ignored.append(f"{action.action_type}: {error}")
    return Hints(brings, tuple(retains), tuple(dict.fromkeys(shares))[:MAX_TARGETS], lets_go, tuple(ignored))


def _major(version: str) -> str:
    return version.partition(".")[0]


def _retains(payload: dict[str, Any]) -> list[Retain]:
    directives = payload.get("directives")
    if directives is None:
        return [Retain(0, None, _seconds(payload, "ttl_seconds"))]
    if not isinstance(directives, list):
        raise UsageError("directives are a list")
    return [_retain(directive) for directive in directives[:MAX_PARTS]]


def _retain(directive: object) -> Retain:
    if not isinstance(directive, dict):
        raise UsageError(f"a directive is an object, not {directive!r}")
    seconds = _seconds(directive, "duration")
    first, last = directive.get("start", 0), directive.get("end")
    if not _is_count(first) or not (last is None or (_is_count(last) and last > first)):
        raise UsageError(f"tokens {first!r} to {last!r} are no range")
    return Retain(first, last, seconds)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _seconds(fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name} is a number of seconds, not {value!r}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not 0 < seconds < math.inf:
        raise UsageError(f"{name} is above 0 and finite, not {value!r}")
    return min(seconds, MAX_RETAINED_S)


def _targets(payload: dict[str, Any]) -> list[str]:
    targets = payload.get("target_node_ids")
    if not isinstance(targets, list) or not all(isinstance(target, str) and target for target in targets):
        raise UsageError(f"target_node_ids is a list of node ids, not {targets!r}")
    return targets
