"""What the two halves of the connector tell each other, by vLLM's own channels: values, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pkv.integrations.kv_hints import Hints
from p2pkv.integrations.vllm_connector.handoff import Handoff
from p2pkv.integrations.vllm_connector.installed import (
    ConnectorMetadata,
    HandshakeMetadata,
    WorkerMetadata,
)
from p2pkv.integrations.vllm_connector.residents import Change
from p2pkv.integrations.vllm_connector.shares import Share


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a request that follow each other, of one group of layers."""

    group: int
    first: int
    """Number of the first one in the request."""
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Pages:
    """Blocks of one group of layers as pages of the page cache."""

    group: int
    hashes: list[bytes]
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Pull:
    """Load a request's blocks from the prefill instance that offers them."""

    request_id: str
    handoff: Handoff | None
    """None if what came with the request can't be read."""
    refusal: str
    """Why the hand-off must not be followed, if so: the load fails. Prefill may still be told that nobody will load."""
    blocks: tuple[Blocks, ...]
    """Where they go."""
    is_awaited: bool
    """Whether the request waits for the load's end. If not, prefill is only told that it may free the blocks."""
    wait_s: float | None = None
    """Seconds that this step, which computes with the blocks, may wait for them; None: it does not, and goes on."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Load a request's blocks from the page cache."""

    request_id: str
    pages: tuple[Pages, ...]
    timeout: float | None = None
    """Seconds after which it is given up, if that is before any load is."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Put blocks, just computed, into the page cache."""

    hold: int
    """To be reported done when nobody reads the blocks any more (:class:`StepReport`)."""
    pages: tuple[Pages, ...]
    request_id: str
    """Of the request that computed them."""


@dataclass(frozen=True, slots=True)
class Leave:
    """A request has finished and its blocks are offered to decode, and kept until this is reported done."""

    request_id: str
    name: str
    blocks: tuple[Blocks, ...]


@dataclass(frozen=True, slots=True)
class Hinted:
    """Do with the pages of a request what an orchestrator asks for."""

    pages: tuple[Pages, ...]
    """Of its blocks from the first one on, by group; where they lie is left out."""
    hints: Hints


@dataclass(slots=True)
class StepMetadata(ConnectorMetadata):
    """What the scheduler's half has for the workers in one step."""

    pulls: list[Pull] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    leaves: list[Leave] = field(default_factory=list)
    hints: list[Hinted] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)
    """Requests that have ended while they may still be loading: vLLM has their blocks back when the loads end."""
    is_cleared: bool = False
    """All that was published is to be taken back."""


@dataclass(slots=True)
class StepReport(WorkerMetadata):
    """What a worker, or several, have for the scheduler's half in one step."""

    done: list[int] = field(default_factory=list)
    """Holds whose blocks a worker does not read any more; each once a worker."""
    changes: list[Change] = field(default_factory=list)
    """What workers' nodes have now, or have no more, in the order in which each noticed."""

    def aggregate(self, other: StepReport) -> StepReport:
        """Return what both tell."""
        return StepReport(self.done + other.done, self.changes + other.changes)


@dataclass(slots=True)
class RankDescription(HandshakeMetadata):
    """What a worker's half tells the scheduler's about its rank, once it has its KV caches."""

    node_id: str
    boot_epoch: int
    fingerprint: Mapping[str, str]
    """What an instance must have in common with this one to take blocks of it."""
    shares: tuple[Share, ...]
    """What it holds of the model, by group."""
    layouts: tuple[str, ...]
    """How its caches lie, by group."""
    namespace: str

    @property
    def layout(self) -> str:
        """How all of them lie."""
        return " | ".join(self.layouts)
