"""The one place that looks for vLLM's offloading. Where it isn't installed, stand-ins do as well, for fast tests."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from enum import Enum, auto
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from p2pkv.integrations import engine
from p2pkv.integrations.vllm_connector.installed import HIT_SOURCE, log_with_the_engine, version

__all__ = [
    "HIT_SOURCE",
    "JobResult",
    "LookupResult",
    "TierBase",
    "TransferJob",
    "log_with_the_engine",
    "offloading_event",
    "request_policy",
    "version",
]

_find = functools.partial(engine.find, is_needed=True)
_OFFLOADING = "vllm.v1.kv_offload"


class TransferJob(Protocol):
    """The part of vLLM's class that is relied on: chunks of its host memory, and what they are called."""

    job_id: int
    keys: Collection[bytes]
    chunk_ids: Sequence[int]
    """Where ``keys`` are, in their order; an array."""


class _Bare:
    """Takes what vLLM's base takes."""

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: object = None,
    ) -> None:
        self.tier_type = tier_type


class _Lookup(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


class _Result(NamedTuple):
    job_id: int
    success: bool
    successful_keys: Collection[bytes] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


if TYPE_CHECKING:
    TierBase = _Bare
    LookupResult = _Lookup
    JobResult = _Result
else:
    TierBase = _find(f"{_OFFLOADING}.tiering.base", "SecondaryTierManager") or _Bare
    LookupResult = _find(f"{_OFFLOADING}.base", "LookupResult") or _Lookup
    JobResult = _find(f"{_OFFLOADING}.tiering.base", "JobResult") or _Result


def request_policy() -> Any:
    """Return that of a request only what is new is to be stored."""
    make = _find(f"{_OFFLOADING}.base", "RequestOffloadingContext") or SimpleNamespace
    return make()


def offloading_event(keys: Sequence[bytes], medium: str, *, is_stored: bool) -> Any:
    """Return vLLM's event of chunks that a medium has now, or has no more."""
    make = _find(f"{_OFFLOADING}.base", "OffloadingEvent") or SimpleNamespace
    media = _find(f"{_OFFLOADING}.base", "Medium")
    return make(keys=list(keys), medium=medium if media is None else media(medium), removed=not is_stored)
