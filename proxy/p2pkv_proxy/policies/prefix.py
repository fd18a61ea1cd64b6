"""The one that was sent the longest beginning of this prompt before, unless it has too much to do.

The trie is kept flat: a block's hash covers all blocks before it, so that a hash stands for a path. What an instance
really still has is not known here; ``cache_aware`` asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from p2pkv_proxy.policies.base import Choice, Policy, lightest
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.registry import Tracked

_MOST_BLOCKS = 200_000
"""About 40 MiB, or 6 million tokens of text; the ones longest unused are forgotten."""
_OVERLOAD = 1.5
_SLACK_TOKENS = 2048
"""Tokens in flight by which an instance may be ahead of the lightest at any rate."""


class Prefix(Policy):
    """Remembers who was sent which beginnings."""

    def __init__(self, most_blocks: int = _MOST_BLOCKS) -> None:
        self._sent: OrderedDict[bytes, set[str]] = OrderedDict()
        self._most_blocks = most_blocks

    def choose(self, prompt: Prompt, candidates: Sequence[Tracked]) -> Choice:
        light = lightest(candidates)
        most = light.weight * _OVERLOAD + _SLACK_TOKENS
        fit = {tracked.id: tracked for tracked in candidates if tracked.weight <= most}
        n_known, holders = self._longest(prompt.blocks(), set(fit))
        chosen = lightest([fit[holder] for holder in sorted(holders)]) if holders else light
        self._remember(prompt.blocks(), chosen.id)
        if not holders:
            return Choice(chosen, "load", "nobody fit was sent this beginning")
        return Choice(chosen, "prefix", f"was sent {n_known} of {len(prompt.blocks())} blocks before")

    def forget(self, instance_id: str) -> None:
        for block in [block for block, holders in self._sent.items() if instance_id in holders]:
            self._sent[block].discard(instance_id)
            if not self._sent[block]:
                del self._sent[block]

    def _longest(self, blocks: Sequence[bytes], among: set[str]) -> tuple[int, set[str]]:
        """Walk down as long as one of ``among`` was sent all of it; return how far, and who."""
        best: set[str] = set()
        for depth, block in enumerate(blocks):
            here = (best or among) & self._sent.get(block, set())
            if not here:
                return depth, best
            best = here
        return len(blocks), best

    def _remember(self, blocks: Sequence[bytes], instance_id: str) -> None:
        for block in blocks:
            self._sent.setdefault(block, set()).add(instance_id)
            self._sent.move_to_end(block)
        while len(self._sent) > self._most_blocks:
            self._sent.popitem(last=False)
