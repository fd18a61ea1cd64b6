"""The connector's half in vLLM's scheduler: which blocks to load from where, to publish, to keep and to offer.

It moves no bytes and waits for nothing. What it decides goes to the workers' halves once a step
(:class:`~p2pkv.integrations.vllm_connector.messages.StepMetadata`); vLLM itself brings their reports back to its
scheduler.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from p2pkv.config import Config
from p2pkv.errors import UsageError
from p2pkv.instances.page_report import FIELD
from p2pkv.integrations.boundary import Boundary
from p2pkv.integrations.kv_hints import Hints, read_hints
from p2pkv.integrations.vllm_connector.block_events import BlockEvents
from p2pkv.integrations.vllm_connector.by_layer import NearInstances
from p2pkv.integrations.vllm_connector.choosing import Choosing
from p2pkv.integrations.vllm_connector.groups import NO_BLOCK
from p2pkv.integrations.vllm_connector.handoff import Handoff, Rank, draw_name, prompt_digest
from p2pkv.integrations.vllm_connector.hints import given_hints
from p2pkv.integrations.vllm_connector.holds import Holds
from p2pkv.integrations.vllm_connector.last_token import leave_last_token
from p2pkv.integrations.vllm_connector.messages import (
    Blocks,
    Fetch,
    Hinted,
    Leave,
    Publish,
    Pull,
    RankDescription,
    StepMetadata,
)
from p2pkv.integrations.vllm_connector.page_names import PageNames, without_holes
from p2pkv.integrations.vllm_connector.prefixes import Part, PrefixLookups
from p2pkv.integrations.vllm_connector.request import Request, Tables, beside_tokens
from p2pkv.integrations.vllm_connector.settings import Instance
from p2pkv.integrations.vllm_connector.stats import Tally
from p2pkv.integrations.vllm_connector.weights import Weights, served
from p2pkv.limited_log import LimitedLog
from p2pkv.node import Node
from p2pkv.recompute.policy import Policy

_log = logging.getLogger(__name__)

_HANDED_OFF = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"})
"""How a prefill request ends whose KV somebody waits for; in every other case nobody does."""
_ABORTED = "FINISHED_ABORTED"


class SchedulerSide:
    """Used by the scheduler's thread alone.

    A request's KV is loaded once at most, when it is first scheduled.
    """

    def __init__(
        self,
        instance: Instance,
        *,
        start_node: Callable[[Config], Node] = Node.start,
        weights: Weights = served,
    ) -> None:
        self._instance = instance
        self._weights, self._names = weights, PageNames(instance, weights)
        self._start_node = start_node
        self._ranks: list[RankDescription] = []
        self._lookups: PrefixLookups | None = None
        self._choosing: Choosing | None = None
        self._next = StepMetadata()
        self._requests: dict[str, Request] = {}
        self._handoffs: dict[str, Pull] = {}  # what a request's parameters say; blocks are not known yet
        # tokens a request has here, when vLLM last asked what else there is
        self._n_local: dict[str, int] = {}
        self._loaded: set[str] = set()
        self._near = NearInstances(instance.layer_deadline)
        self._by_layer: dict[str, float] = {}  # seconds that a step may wait for the load
        self._n_known: dict[str, int] = {}  # tokens of a request that need not be published any more
        self._shortened: set[str] = set()  # prefill requests without their last token
        self._hints: dict[str, Hints] = {}  # what is to be done when a request has finished
        self._log = LimitedLog(_log)
        self.holds = Holds(instance.world_size)
        self.events = BlockEvents()
        self.tally = Tally()

    def connect(self, ranks: Sequence[RankDescription]) -> None:
        """Take what the workers say of themselves, in the order of their ranks; called once, before any request.

        Raises the errors of :meth:`~p2pkv.node.Node.start`: vLLM then doesn't start.
        """
        self._ranks = list(ranks)
        if self._instance.writes_prefixes and not self._instance.follows_hints:
            _log.info("KV hints will not be followed: %s", self._why_no_hints())
        # a stage of a pipeline may have no layer of some group
        n_groups = len(self._instance.groups.each)
        self.events.connect(
            [frozenset(number for number, r in enumerate(ranks) if r.layouts[g]) for g in range(n_groups)]
        )
        if self._instance.reads_prefixes:
            node = self._start_node(self._instance.scheduler_config(self._ranks[0].namespace))
            boundary = Boundary("vLLM's scheduler", node.metrics)
            parts = [
                [Part(number, g, r.layouts[g]) for number, r in enumerate(self._ranks) if r.layouts[g]]
                for g in range(len(self._instance.groups.each))
            ]
            self._lookups = PrefixLookups(
                node, boundary, self._instance.groups, self._instance.hash_size, parts
            )
            kind = self._instance.fetch_prefixes
            self._choosing = Choosing(
                Policy(kind, node.metrics), self.tally, fetches_unjudged=kind != "never"
            )

    def close(self) -> None:
        """Leave the cluster. Idempotent."""
        if self._lookups is not None:
            self._lookups.close()

    # --- before a request runs

    def arrived(self, request: Request) -> None:
        """Take note of a new request."""
        self._requests[request.request_id] = request
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and self._instance.is_consumer:
            self._handoffs[request.request_id] = self._read_handoff(request, params)
        if params.get("do_remote_decode") and self._instance.is_producer:
            self._shorten(request)
        # the last thing that may raise
        if (envelope := given_hints(request.kv_hints, params)) is not None:
            self._take_hints(request, read_hints(envelope))

    def _take_hints(self, request: Request, hints: Hints) -> None:
        for why in hints.ignored:
            self._log.warning(why, "a KV hint is not followed: %s", why)
        if not self._instance.follows_hints:
            if hints:
                self._log.warning("no pool", "KV hints are not followed: %s", self._why_no_hints())
            return
        if hints.brings:
            self._next.hints.append(Hinted(self._names.of_request(request), Hints(brings=True)))
        if rest := dataclasses.replace(hints, brings=False):
            self._hints[request.request_id] = rest

    def _why_no_hints(self) -> str:
        if self._instance.config.attach:
            return (
                f"pages are in the care of the node at {self._instance.config.attach}, not of this instance"
            )
        return "this instance keeps no pages to share"

    def _shorten(self, request: Request) -> None:
        if self._instance.groups.keeps_all or request.request_id in self._shortened:
            return
        if leave_last_token(request, self._instance.hash_size):
            self._shortened.add(request.request_id)

    def n_external(self, request: Request, n_local: int) -> int | None:
        """Return how many tokens after the first ``n_local`` can be loaded; None: not known yet, ask again."""
        request_id = request.request_id
        self._n_local[request_id] = n_local
        if request_id in self._loaded:
            return 0
        offered = self._handoffs.get(request_id)
        if offered is not None:
            return max(0, self._n_loadable(request, offered) - n_local)
        if self._lookups is None or self._choosing is None:
            return 0
        # not the whole prompt: the last token is computed in any case, and its block with it
        limit = min(request.num_tokens - 1, len(request.block_hashes) * self._instance.hash_size)
        found = self._lookups.found(request, n_local, limit, weights=self._weights.name)
        # tokens that have been computed here meanwhile need not be loaded
        return None if found is None else max(0, self._choosing.end(request_id, found) - n_local)

    def is_by_layer(self, request: Request) -> bool:
        """Whether what :meth:`n_external` has last said of a request is to be loaded by layer, within a step."""
        return request.request_id in self._by_layer

    def _n_loadable(self, request: Request, offered: Pull) -> int:
        """Decide how it is loaded, and return how many tokens are."""
        self._by_layer.pop(request.request_id, None)
        n_offered, wait_s = self._n_offered(request, offered), self._near.wait_s(offered.handoff)
        if wait_s is None or offered.refusal:
            return n_offered
        self._by_layer[request.request_id] = wait_s
        # what the step writes must not lie in a block that is loaded meanwhile, and it has one token to compute
        alignment = self._instance.groups.alignment
        return min(n_offered, request.num_tokens - 1) // alignment * alignment

    def _n_offered(self, request: Request, offered: Pull) -> int:
        handoff, groups = offered.handoff, self._instance.groups
        if handoff is None or offered.refusal or handoff.n_tokens == request.num_prompt_tokens:
            return request.num_prompt_tokens
        if not groups.keeps_all:
            return handoff.n_tokens
        return handoff.n_tokens // groups.alignment * groups.alignment

    def allocated(self, request: Request, tables: Tables, n_external: int) -> bool:
        """Have the blocks loaded that vLLM has made room for. vLLM calls again when they are there."""
        request_id = request.request_id
        if request_id in self._loaded:
            return True
        offered = self._handoffs.pop(request_id, None)
        if offered is not None:
            wanted = self._wanted(request_id, tables, n_external)
            if wanted:
                self._near.began(request_id, offered.handoff, wanted[0].ids)
            self._pull(offered, wanted, is_awaited=n_external > 0)
        elif self._choosing is not None:
            wanted = self._wanted(request_id, tables, n_external)
            limit_s = self._choosing.began(request_id, wanted[0].ids if wanted else ())
            # even if none is wanted, as after the end of a chunk: the request waits for the load's end
            if n_external:
                pages = self._names.of_blocks(request, wanted)
                self._next.fetches.append(Fetch(request_id, pages, limit_s))
        self._loaded.add(request_id)
        if self._lookups is not None:
            self._lookups.forget(request_id)
        return True

    def _wanted(self, request_id: str, tables: Tables, n_external: int) -> tuple[Blocks, ...]:
        """Return the blocks that are to hold what ``n_external`` tokens after those that are here leave to the rest."""
        if not n_external:
            return ()
        n_local = self._n_local.get(request_id, 0)
        missing = [group.missing(n_local, n_local + n_external) for group in self._instance.groups.each]
        wanted = tuple(
            Blocks(g, numbers.start, list(tables[g][numbers.start : numbers.stop]))
            for g, numbers in enumerate(missing)
            if numbers
        )
        if any(NO_BLOCK in blocks.ids for blocks in wanted):
            raise UsageError("vLLM has not made room for all blocks that the request needs")
        return wanted

    def fail(self, request: Request, tables: Tables, n_external: int, why: str) -> None:
        """Have the load fail for which vLLM has made room: it waits for its end, whatever became of the rest."""
        request_id = request.request_id
        if request_id in self._loaded or not n_external:
            return
        self._loaded.add(request_id)
        # of one full group vLLM asks which blocks failed, of several only which request
        n_local = self._n_local.get(request_id, 0)
        missing = self._instance.groups.each[0].missing(n_local, n_local + n_external)
        wanted = (Blocks(0, missing.start, list(tables[0][missing.start : missing.stop])),)
        wait_s = self._by_layer.get(request_id)
        self._next.pulls.append(Pull(request_id, None, why, wanted, is_awaited=True, wait_s=wait_s))

    def _pull(self, offered: Pull, blocks: tuple[Blocks, ...], *, is_awaited: bool) -> None:
        # else there is neither a load to fail nor anybody to tell
        if offered.handoff is not None or is_awaited:
            wait_s = self._by_layer.get(offered.request_id) if is_awaited else None
            pull = Pull(offered.request_id, offered.handoff, offered.refusal, blocks, is_awaited, wait_s)
            self._next.pulls.append(pull)

    def _read_handoff(self, request: Request, params: Mapping[str, Any]) -> Pull:
        """Return what ``params`` ask to be loaded. What can't be followed fails as a load: vLLM's policy decides."""
        refusal, handoff = "", None
        try:
            handoff = Handoff.from_params(params)
            tokens = request.prompt_token_ids or ()
            most = len(tokens) if self._instance.groups.keeps_all else len(tokens) - 1
            if most < handoff.n_tokens:
                raise UsageError(f"{handoff.n_tokens} tokens are handed off, the prompt has {len(tokens)}")
            if prompt_digest(tokens[: handoff.n_tokens], beside_tokens(request)) != handoff.prompt:
                raise UsageError("another prompt is handed off than the request has")
        except UsageError as error:
            refusal = str(error)
        return Pull(request.request_id, handoff, refusal, (), is_awaited=False)

    # --- each step

    def step(self, preempted: Sequence[str]) -> StepMetadata:
        """Return what the workers are to do in this step, but for :meth:`publish`."""
        metadata, self._next = self._next, StepMetadata()
        for request_id in preempted:
            self._n_known.pop(request_id, None)
        return metadata

    def observe(self, scheduled: Iterable[str], preempted: Iterable[str]) -> None:
        """See how long prompts take to compute; of ``scheduled`` requests tokens run in the next step."""
        if self._choosing is not None:
            self._choosing.preempted(preempted)
            self._choosing.scheduled(scheduled, self._requests)

    def heard(self, loaded: Collection[str], failed_blocks: Collection[int]) -> None:
        """Take note of what a step has brought."""
        self._near.heard(loaded, failed_blocks)
        if self._choosing is not None:
            self._choosing.loaded(loaded, failed_blocks)
            self._choosing.look()

    def ended(self, request: Request) -> None:
        """See whether a request that has finished was computed, before it is forgotten."""
        if self._choosing is not None:
            self._choosing.finished(request)

    def publish(
        self, metadata: StepMetadata, n_scheduled: Mapping[str, int], tables: Callable[[str], Tables]
    ) -> None:
        """Have the blocks published that this step fills, in which ``n_scheduled`` tokens of each request run."""
        if self._instance.writes_prefixes:
            for request_id, n_tokens in n_scheduled.items():
                request = self._requests.get(request_id)
                if request is not None:
                    self._publish(metadata, request, n_tokens, tables)

    def _publish(
        self, metadata: StepMetadata, request: Request, n_scheduled: int, tables: Callable[[str], Tables]
    ) -> None:
        """Blocks that were here before this request are known to others already."""
        request_id = request.request_id
        first = self._n_known.setdefault(request_id, request.num_computed_tokens)
        last = min(
            request.num_computed_tokens + n_scheduled,
            len(request.block_hashes) * self._instance.hash_size,  # tokens that are only guessed have no hash
        )
        numbers = [range(first // g.block_size, last // g.block_size) for g in self._instance.groups.each]
        if not any(numbers):
            return
        by_group = tables(request_id)
        blocks = [Blocks(g, n.start, list(by_group[g][n.start : n.stop])) for g, n in enumerate(numbers) if n]
        pages = tuple(without_holes(each) for each in self._names.of_blocks(request, blocks))
        hold = self.holds.take([block_id for each in pages for block_id in each.ids])
        if self._instance.tells_events:
            for g, n in enumerate(numbers):
                group = self._instance.groups.each[g]
                self.events.contents.note(request, g, group, n, self._instance.hash_size)
        metadata.publishes.append(Publish(hold, pages, request_id))
        self._n_known[request_id] = last

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
        # of the end of a hold the scheduler hears in a step only; until then the block can't be had by anybody
        news = self._next
        return news.is_cleared or bool(news.revoked) or bool(news.hints) or len(self.holds) > 0

    # --- when a request has finished

    def finished(
        self, request: Request, tables: Tables, handoff: Handoff | None
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether its blocks must be kept until the workers release them, and what the response is to say."""
        request_id = request.request_id
        self._requests.pop(request_id, None)
        self._n_local.pop(request_id, None)
        if request_id in self._loaded and request.status.name == _ABORTED:
            self._next.revoked.append(request_id)
        self._loaded.discard(request_id)
        self._near.ended(request_id)
        self._by_layer.pop(request_id, None)
        self._shortened.discard(request_id)
        if self._lookups is not None:
            self._lookups.forget(request_id)
        never_loaded = self._handoffs.pop(request_id, None)
        # it ended before it was scheduled, while prefill keeps blocks for it; after a request that fails vLLM sends
        # one of these, of another prompt, for this very purpose
        if never_loaded is not None:
            self._pull(never_loaded, (), is_awaited=False)
        self._n_known.pop(request_id, None)
        hints = self._hints.pop(request_id, None)
        if hints is not None:
            self._next.hints.append(Hinted(self._names.of_request(request), hints))
        if handoff is None:
            return False, None
        needed = [group.needed(handoff.n_tokens) for group in self._instance.groups.each]
        blocks = tuple(Blocks(g, n.start, list(tables[g][n.start : n.stop])) for g, n in enumerate(needed))
        if any(NO_BLOCK in each.ids for each in blocks):
            _log.warning("request %s is not handed off: vLLM has let blocks go that decode needs", request_id)
            return False, None
        params = handoff.to_params()
        if (pages := self._names.report(request, self._ranks[0])) is not None:
            params[FIELD] = pages
        # nothing below may raise
        self._next.leaves.append(Leave(request_id, handoff.name, blocks))
        return True, params

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
        if not self._instance.groups.keeps_all and request.request_id not in self._shortened:
            return None
        return Handoff(
            name=draw_name(request.request_id),
            ranks=tuple(
                Rank(rank.node_id, rank.boot_epoch, rank.layout, rank.shares) for rank in self._ranks
            ),
            split=self._instance.split,
            n_tokens=len(tokens),
            prompt=prompt_digest(tokens, beside_tokens(request)),
            fingerprint=self._ranks[0].fingerprint,
        )
