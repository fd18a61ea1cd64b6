"""The connector's half in vLLM's scheduler: which blocks to load from where, to publish, to keep and to offer.

It moves no bytes and waits for nothing. What it decides goes to the workers' halves once a step
(:class:`~p2pkv.integrations.vllm_connector.messages.StepMetadata`); vLLM itself brings their reports back to its
scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from p2pkv.config import Config
from p2pkv.errors import UsageError
from p2pkv.integrations.boundary import Boundary
from p2pkv.integrations.vllm_connector.handoff import Handoff, Rank, draw_name, prompt_digest
from p2pkv.integrations.vllm_connector.messages import (
    Fetch,
    Leave,
    Publish,
    Pull,
    RankDescription,
    StepMetadata,
)
from p2pkv.integrations.vllm_connector.prefixes import Part, PrefixLookups
from p2pkv.integrations.vllm_connector.settings import Instance
from p2pkv.integrations.vllm_connector.weights import Weights, named, served
from p2pkv.node import Node

_log = logging.getLogger(__name__)

_HANDED_OFF = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"})
"""How a prefill request ends whose KV somebody waits for; in every other case nobody does."""
_ABORTED = "FINISHED_ABORTED"


class Request(Protocol):
    """The part of vLLM's request that is relied on."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[bytes]
    kv_transfer_params: Mapping[str, Any] | None
    status: Any
    lora_request: Any
    mm_features: Sequence[Any]


class SchedulerSide:
    """Used by the scheduler's thread alone.

    A request's KV is loaded once at most, when it is first scheduled, and its blocks are published only after that. So
    vLLM never waits for a load and for a release of one request at the same time, which it takes for a bug of its own.
    """

    def __init__(
        self,
        instance: Instance,
        *,
        start_node: Callable[[Config], Node] = Node.start,
        weights: Weights = served,
    ) -> None:
        self._instance = instance
        self._weights = weights
        self._start_node = start_node
        self._ranks: list[RankDescription] = []
        self._lookups: PrefixLookups | None = None
        self._next = StepMetadata()
        self._requests: dict[str, Request] = {}
        self._handoffs: dict[str, Pull] = {}  # what a request's parameters say; blocks are not known yet
        self._n_local: dict[
            str, int
        ] = {}  # tokens a request has here, when vLLM last asked what else there is
        self._loaded: set[str] = set()
        self._n_known: dict[str, int] = {}  # blocks of a request that need not be published any more
        self._published: set[str] = set()

    def connect(self, ranks: Sequence[RankDescription]) -> None:
        """Take what the workers say of themselves, in the order of their ranks; called once, before any request.

        Raises the errors of :meth:`~p2pkv.node.Node.start`: vLLM then doesn't start.
        """
        self._ranks = list(ranks)
        if self._instance.reads_prefixes:
            node = self._start_node(self._instance.scheduler_config(self._ranks[0].namespace))
            boundary = Boundary("vLLM's scheduler", node.metrics)
            parts = [Part(number, rank.layout) for number, rank in enumerate(self._ranks)]
            self._lookups = PrefixLookups(node, boundary, parts)

    def close(self) -> None:
        """Leave the cluster. Idempotent."""
        if self._lookups is not None:
            self._lookups.close()

    # --- before a request runs

    def arrived(self, request: Request) -> None:
        """Take note of a new request."""
        self._requests[request.request_id] = request
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill") and self._instance.is_consumer:
            self._handoffs[request.request_id] = _read_handoff(request, params)

    def n_external(self, request: Request, n_local: int) -> int | None:
        """Return how many tokens after the first ``n_local`` can be loaded; None: not known yet, ask again."""
        request_id = request.request_id
        self._n_local[request_id] = n_local
        if request_id in self._loaded:
            return 0
        offered = self._handoffs.get(request_id)
        if offered is not None:
            return max(0, self._n_offered(request, offered) - n_local)
        if self._lookups is None:
            return 0
        block_size = self._instance.block_size
        # not the whole prompt: the last token is computed in any case, and its block with it
        hashes = request.block_hashes[: (request.num_tokens - 1) // block_size]
        n_blocks = self._lookups.n_found(request_id, hashes, n_local // block_size, self._weights.name)
        return None if n_blocks is None else n_blocks * block_size

    def _n_offered(self, request: Request, offered: Pull) -> int:
        handoff, block_size = offered.handoff, self._instance.block_size
        if handoff is None or offered.refusal or handoff.n_tokens == request.num_prompt_tokens:
            return request.num_prompt_tokens
        return handoff.n_tokens // block_size * block_size

    def allocated(self, request: Request, block_ids: Sequence[int], n_external: int) -> bool:
        """Have the blocks loaded that vLLM has made room for. vLLM calls again when they are there."""
        request_id = request.request_id
        if request_id in self._loaded:
            return True
        n_local, block_size = self._n_local.get(request_id, 0), self._instance.block_size
        first, last = n_local // block_size, -(-(n_local + n_external) // block_size)
        offered = self._handoffs.pop(request_id, None)
        if offered is not None:
            wanted = list(block_ids[first:last]) if n_external else []
            self._pull(offered, first, wanted)
        elif n_external:
            hashes = named(self._weights.name, request.block_hashes[first:last])
            self._next.fetches.append(Fetch(request_id, hashes, list(block_ids[first:last])))
        self._loaded.add(request_id)
        if self._lookups is not None:
            self._lookups.forget(request_id)
        return True

    def fail(self, request: Request, block_ids: Sequence[int], n_external: int, why: str) -> None:
        """Have the load fail for which vLLM has made room: it waits for its end, whatever became of the rest."""
        request_id = request.request_id
        if request_id in self._loaded or not n_external:
            return
        self._loaded.add(request_id)
        n_local, block_size = self._n_local.get(request_id, 0), self._instance.block_size
        wanted = list(block_ids[n_local // block_size : -(-(n_local + n_external) // block_size)])
        self._next.pulls.append(Pull(request_id, None, why, 0, wanted))

    def _pull(self, offered: Pull, first_block: int, block_ids: list[int]) -> None:
        if (
            offered.handoff is not None or block_ids
        ):  # else there is neither a load to fail nor anybody to tell
            self._next.pulls.append(
                Pull(offered.request_id, offered.handoff, offered.refusal, first_block, block_ids)
            )

    # --- each step

    def step(self, preempted: Sequence[str]) -> StepMetadata:
        """Return what the workers are to do in this step, but for :meth:`publish`."""
        metadata, self._next = self._next, StepMetadata()
        metadata.preempted = list(preempted)
        for request_id in preempted:
            self._n_known.pop(request_id, None)
        return metadata

    def publish(
        self,
        metadata: StepMetadata,
        n_scheduled: Mapping[str, int],
        block_ids: Callable[[str], Sequence[int]],
    ) -> None:
        """Have the blocks published that this step fills, in which ``n_scheduled`` tokens of each request run."""
        if self._instance.writes_prefixes:
            for request_id, n_tokens in n_scheduled.items():
                request = self._requests.get(request_id)
                if request is not None:
                    self._publish(metadata, request, n_tokens, block_ids)

    def _publish(
        self,
        metadata: StepMetadata,
        request: Request,
        n_scheduled: int,
        block_ids: Callable[[str], Sequence[int]],
    ) -> None:
        """Blocks that were here before this request are known to others already."""
        block_size, request_id = self._instance.block_size, request.request_id
        first = self._n_known.setdefault(request_id, request.num_computed_tokens // block_size)
        last = min(
            (request.num_computed_tokens + n_scheduled) // block_size,
            len(request.block_hashes),  # tokens that are only guessed have no hash
        )
        if last > first:
            hashes = named(self._weights.name, request.block_hashes[first:last])
            metadata.publishes.append(Publish(request_id, hashes, list(block_ids(request_id)[first:last])))
            self._n_known[request_id] = last
            self._published.add(request_id)

    def clear(self) -> None:
        """Forget what was published: the weights have changed.

        Others' blocks of the old weights, and those that are still being published, have another name than blocks have
        from here on; what this instance published is taken back besides, to make room.
        """
        self._weights.reset()
        self._next.is_cleared = True

    @property
    def has_news(self) -> bool:
        """Whether the workers must hear of something, even if nothing is to run."""
        return self._next.is_cleared or bool(self._next.revoked)

    # --- when a request has finished

    def finished(
        self, request: Request, block_ids: Sequence[int], handoff: Handoff | None
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether its blocks must be kept until the workers release them, and what the response is to say."""
        request_id = request.request_id
        self._requests.pop(request_id, None)
        self._n_local.pop(request_id, None)
        if request_id in self._loaded and request.status.name == _ABORTED:
            self._next.revoked.append(request_id)
        self._loaded.discard(request_id)
        if self._lookups is not None:
            self._lookups.forget(request_id)
        never_loaded = self._handoffs.pop(request_id, None)
        # it ended before it was scheduled, while prefill keeps blocks for it; after a request that fails vLLM sends
        # one of these, of another prompt, for this very purpose
        if never_loaded is not None:
            self._pull(never_loaded, 0, [])
        self._n_known.pop(request_id, None)
        was_published = request_id in self._published
        params = None if handoff is None else handoff.to_params()  # the last thing that may raise
        self._published.discard(request_id)
        if handoff is not None:
            n_blocks = -(-handoff.n_tokens // self._instance.block_size)
            self._next.leaves.append(Leave(request_id, handoff.name, list(block_ids[:n_blocks])))
            return True, params
        if was_published:
            self._next.leaves.append(Leave(request_id, None, []))
        return was_published, None

    def kept(self, request: Request) -> tuple[bool, None]:
        """Have the workers say when a request's blocks are free, of which nothing else is known any more.

        One that was never published has nobody who reads them; it may be loading, and vLLM waits for one end only.
        """
        if request.request_id not in self._published:
            return False, None
        self._published.discard(request.request_id)
        self._next.leaves.append(Leave(request.request_id, None, []))
        return True, None

    def handoff(self, request: Request) -> Handoff | None:
        """Return what decode is to be told of a request that has finished, if it is to be handed off."""
        params = request.kv_transfer_params
        if not self._instance.is_producer or not params or not params.get("do_remote_decode"):
            return None
        tokens = request.prompt_token_ids
        if request.status.name not in _HANDED_OFF or request.num_computed_tokens < request.num_prompt_tokens:
            return None
        if not tokens:
            _log.warning("a prompt of embeddings can't be handed off; decode will compute it")
            return None
        return Handoff(
            name=draw_name(request.request_id),
            ranks=tuple(Rank(rank.node_id, rank.boot_epoch, rank.layout) for rank in self._ranks),
            n_tokens=len(tokens),
            prompt=prompt_digest(tokens, _beside_tokens(request)),
            fingerprint=self._ranks[0].fingerprint,
        )


def _read_handoff(request: Request, params: Mapping[str, Any]) -> Pull:
    """Return what ``params`` ask to be loaded. What can't be followed is a load that fails: vLLM's policy decides."""
    refusal, handoff = "", None
    try:
        handoff = Handoff.from_params(params)
        tokens = request.prompt_token_ids or ()
        if len(tokens) < handoff.n_tokens:
            raise UsageError(f"{handoff.n_tokens} tokens are handed off, the prompt has {len(tokens)}")
        if prompt_digest(tokens[: handoff.n_tokens], _beside_tokens(request)) != handoff.prompt:
            raise UsageError("another prompt is handed off than the request has")
    except UsageError as error:
        refusal = str(error)
    return Pull(request.request_id, handoff, refusal, 0, [])


def _beside_tokens(request: Request) -> list[str]:
    """Return what a prompt's KV depends on besides its tokens."""
    lora = request.lora_request
    named = [] if lora is None else [f"lora {lora.lora_name} {lora.lora_path}"]
    return named + [f"input {feature.identifier}" for feature in request.mm_features]
