"""What the two halves of the connector tell each other, by vLLM's own channels: values, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pkv.integrations.vllm_connector.handoff import Handoff
from p2pkv.integrations.vllm_connector.installed import ConnectorMetadata, HandshakeMetadata


@dataclass(frozen=True, slots=True)
class Pull:
    """Load a request's blocks from the prefill instance that offers them."""

    request_id: str
    handoff: Handoff | None
    """None if what came with the request can't be read."""
    refusal: str
    """Why the hand-off must not be followed, if so: the load fails. Prefill may still be told that nobody will load."""
    first_block: int
    """Number of the first block to load among those offered; the ones before it are here already."""
    block_ids: list[int]
    """Where they go. None at all: the blocks are not needed, and prefill is only told that it may free them."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Load a request's blocks from the page cache."""

    request_id: str
    hashes: list[bytes]
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Publish:
    """Put a request's blocks, just computed, into the page cache."""

    request_id: str
    hashes: list[bytes]
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Leave:
    """A request has finished and its blocks are kept until this is reported done."""

    request_id: str
    name: str | None
    """Under which its blocks are offered to decode; None if nobody is to load them."""
    block_ids: list[int]


@dataclass(slots=True)
class StepMetadata(ConnectorMetadata):
    """What the scheduler's half has for the workers in one step."""

    pulls: list[Pull] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    leaves: list[Leave] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks are about to be given to others."""
    revoked: list[str] = field(default_factory=list)
    """Requests that have ended while they may still be loading: vLLM has their blocks back when the loads end."""
    is_cleared: bool = False
    """All that was published is to be taken back."""


@dataclass(slots=True)
class RankDescription(HandshakeMetadata):
    """What a worker's half tells the scheduler's about its rank, once it has its KV caches."""

    node_id: str
    boot_epoch: int
    fingerprint: Mapping[str, str]
    layout: str
    namespace: str
