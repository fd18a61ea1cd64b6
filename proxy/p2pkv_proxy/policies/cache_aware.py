"""The one that already holds most of the prompt, weighed against what it has to do.

How much each p2pkv node holds of the prompt is asked of the directory before. Every instance can fetch pages that
another one holds, but its own are there at once: moving a page costs a fraction of computing it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from p2pkv_proxy.policies.base import Choice, Policy, burden
from p2pkv_proxy.policies.prefix import Prefix
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.tracked import Tracked

_MOVE_SHARE = 0.1
"""What fetching a page costs of computing it; guess between 0.02 (GPU, RDMA) and 0.3 (small model, tcp)."""


class CacheAware(Policy):
    """Falls back to ``prefix`` where the directory can't say, and says so."""

    wants_holdings: ClassVar[bool] = True

    def __init__(self) -> None:
        self._fallback = Prefix()

    def choose(self, prompt: Prompt, candidates: Sequence[Tracked]) -> Choice:
        # always asked, so that it knows the recent past should the directory fall silent
        fallback = self._fallback.choose(prompt, candidates)
        if prompt.holdings is None:
            return Choice(fallback.tracked, "fallback", f"{prompt.holdings_flaw}; {fallback.detail}")
        holdings = prompt.holdings
        if holdings.total == 0:
            return Choice(fallback.tracked, "uncached", fallback.detail)

        now = time.monotonic()

        def cost(tracked: Tracked) -> float:
            return (
                burden(tracked, now) + (holdings.total - holdings.at(tracked.instance.node_id)) * _MOVE_SHARE
            )

        chosen = min(candidates, key=lambda tracked: (cost(tracked), tracked is not fallback.tracked))
        own = holdings.at(chosen.instance.node_id)
        most = max(holdings.at(tracked.instance.node_id) for tracked in candidates)
        reason = "cache" if own == most else "load"
        detail = (
            f"holds {own} of {prompt.n_tokens} tokens, all nodes together {holdings.total}; "
            f"{chosen.weight:.0f} tokens in flight"
        )
        return Choice(chosen, reason, detail)

    def forget(self, instance_id: str) -> None:
        self._fallback.forget(instance_id)
