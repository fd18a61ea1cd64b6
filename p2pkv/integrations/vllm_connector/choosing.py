"""How much of a prompt that others have computed is fetched, and how much is computed here all the same.

``p2pkv.recompute`` decides, by what fetching and computing have taken of late. Both are seen from here: a fetch takes
from when vLLM has made room for it until vLLM hears that it has ended, and a prompt is computed from when it is first
scheduled until its first token is there. So both hold what other requests and the steps of the engine cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from p2pkv.integrations.vllm_connector.prefixes import Found
from p2pkv.integrations.vllm_connector.request import Request
from p2pkv.integrations.vllm_connector.stats import Tally
from p2pkv.recompute.policy import Decision, Policy


@dataclass(slots=True)
class _Plan:
    """What was decided about a request."""

    decision: Decision
    began: float | None = None
    """When vLLM had made room for it; None: it has not yet."""
    block_ids: Sequence[int] = ()
    """What is fetched, page by page."""
    is_fetched: bool = False


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A request of which tokens of the prompt are being computed."""

    request: Request
    first: int
    """How many tokens were there before."""
    began: float


@dataclass(slots=True)
class Choosing:
    """Used by the scheduler's thread alone."""

    policy: Policy
    tally: Tally
    fetches_unjudged: bool = True
    """Whether that is fetched of which parts are worth nothing, as in models of several groups of layers."""
    clock: Callable[[], float] = time.monotonic
    _plans: dict[str, _Plan] = field(default_factory=dict)
    _prefills: dict[str, _Prefill] = field(default_factory=dict)

    def end(self, request_id: str, found: Found) -> int:
        """Return after how many tokens of the prompt fetching ends; the same for the same ``found``."""
        hits = found.hits
        if hits is None:
            return found.n_tokens if self.fetches_unjudged else 0
        plan = self._plans.get(request_id)
        if plan is None or plan.decision.hits is not hits:
            self._drop(request_id)
            plan = self._plans[request_id] = _Plan(self.policy.decide(hits))
        return hits.first_token + plan.decision.n_pages * hits.page_tokens

    def began(self, request_id: str, block_ids: Sequence[int]) -> float | None:
        """Take note that vLLM has made room for a request, and for what is fetched.

        Returns after how many seconds the fetch is to be given up; None: when any load is.
        """
        plan = self._plans.get(request_id)
        if plan is None:
            return None
        decision = plan.decision
        if len(block_ids) != decision.n_pages:  # another request has computed some of it meanwhile
            self._drop(request_id)
            return None
        plan.began, plan.block_ids = self.clock(), block_ids
        self.tally.count("prefix_blocks_recomputed", len(decision.hits) - decision.n_pages)
        return decision.limit_s

    def loaded(self, request_ids: Iterable[str], failed_blocks: Collection[int]) -> None:
        """Take note of loads that have ended, and of the blocks that did not come."""
        for request_id in request_ids:
            plan = self._plans.get(request_id)
            if plan is None or plan.began is None or plan.is_fetched or not plan.block_ids:
                continue
            failed = np.isin(plan.block_ids, list(failed_blocks)) if failed_blocks else None
            self.policy.fetched(plan.decision, self.clock() - plan.began, failed)
            plan.is_fetched = True

    def scheduled(self, request_ids: Iterable[str], requests: Mapping[str, Request]) -> None:
        """Take note of which requests run in the next step; vLLM has not counted its tokens as computed yet."""
        self.look()
        for request_id in request_ids:
            request = requests.get(request_id)
            if request is None or request_id in self._prefills:
                continue
            if request.num_computed_tokens < request.num_prompt_tokens == request.num_tokens:
                self._prefills[request_id] = _Prefill(request, request.num_computed_tokens, self.clock())

    def look(self) -> None:
        """See which prompts have been computed."""
        for request_id in [id_ for id_, prefill in self._prefills.items() if _has_begun(prefill.request)]:
            self._computed(request_id)

    def _computed(self, request_id: str) -> None:
        now, prefill = self.clock(), self._prefills.pop(request_id)
        n_tokens = prefill.request.num_prompt_tokens - prefill.first
        self.policy.computed(prefill.first, n_tokens, now - prefill.began)
        plan = self._plans.pop(request_id, None)
        if plan is None:
            return
        if plan.began is None:
            self.policy.dropped(plan.decision)
        else:
            self.policy.settled(plan.decision, now - plan.began)

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Forget what was seen of requests that are begun anew."""
        for request_id in request_ids:
            self._prefills.pop(request_id, None)
            self._drop(request_id)

    def finished(self, request: Request) -> None:
        """Take note that a request has ended: its prompt may just have been computed."""
        request_id = request.request_id
        if request_id in self._prefills and _has_begun(request):
            self._computed(request_id)
        self._prefills.pop(request_id, None)
        self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        plan = self._plans.pop(request_id, None)
        if plan is not None:
            self.policy.dropped(plan.decision)


def _has_begun(request: Request) -> bool:
    """Whether there is a token after the prompt: until then vLLM counts as computed what it has only scheduled."""
    return request.num_tokens > request.num_prompt_tokens
