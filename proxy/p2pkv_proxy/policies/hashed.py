"""The same one for the same key, whichever router is asked, unless it has too much to do.

Every key has an order of all instances (rendezvous hashing): one that comes or goes moves its own keys only, and
routers that stand beside each other agree without a word.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from p2pkv_proxy.policies.base import Choice, Policy, burden
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.tracked import Tracked

_KEY_BLOCKS = 8
"""Of a prompt's beginning, 256 tokens: long enough to tell system prompts apart. A guess."""
_OVERLOAD = 1.25
"""As in consistent hashing with bounded loads: who is this far above the mean is passed over."""
_SLACK_PROMPTS = 2
"""Prompts as long as this one by which it may be above at any rate."""


class ConsistentHash(Policy):
    """By the prompt's beginning."""

    def choose(self, prompt: Prompt, candidates: Sequence[Tracked]) -> Choice:
        key = self.key(prompt)
        now = time.monotonic()
        weights = {tracked.id: burden(tracked, now) for tracked in candidates}
        mean = sum(weights.values()) / len(candidates)
        most = mean * _OVERLOAD + _SLACK_PROMPTS * prompt.n_tokens
        order = sorted(candidates, key=lambda tracked: _rank(key, tracked.id))
        fit = [tracked for tracked in order if weights[tracked.id] <= most]
        chosen = fit[0]  # not all are above the mean
        reason = "hash" if chosen is order[0] else "load"
        return Choice(chosen, reason, f"number {order.index(chosen) + 1} of its key's {len(order)}")

    def key(self, prompt: Prompt) -> bytes:
        """Return what requests that belong together have in common."""
        blocks = prompt.blocks()[:_KEY_BLOCKS]
        return blocks[-1] if blocks else repr(prompt.parts[:1])[:1024].encode()


class Session(ConsistentHash):
    """By what the client names as the session; by the prompt's beginning if it names none."""

    def key(self, prompt: Prompt) -> bytes:
        return prompt.session.encode() if prompt.session else super().key(prompt)


def _rank(key: bytes, instance_id: str) -> bytes:
    return hashlib.blake2b(key + b"\0" + instance_id.encode(), digest_size=8).digest()
