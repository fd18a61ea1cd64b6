"""For decodes: the one with the least KV, of those that have room for the prompt.

How much KV an instance holds it says itself with its heartbeats, prompts and generated tokens alike; what was sent to
it since is added. So a request that may generate 32,000 tokens and stops after 50 weighs what it is, and nobody is sent
what would push others' KV out.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv_proxy.policies.base import Choice, Policy, lightest
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.tracked import Tracked


class KVSpace(Policy):
    """Counts tokens in flight, as ``least_loaded``, unless all instances say how much KV they have."""

    def choose(self, prompt: Prompt, candidates: Sequence[Tracked]) -> Choice:
        if not all(tracked.load.kv_capacity for tracked in candidates):
            chosen = lightest(candidates)
            return Choice(chosen, "load", f"{chosen.weight:.0f} tokens in flight; not all say what they hold")
        roomy = [t for t in candidates if t.kv_tokens + prompt.n_tokens <= t.load.kv_capacity]
        chosen = min(roomy or candidates, key=lambda t: (t.kv_tokens / t.load.kv_capacity, t.busy, t.sent))
        detail = f"holds {chosen.kv_tokens} of {chosen.load.kv_capacity} tokens of KV"
        return Choice(chosen, "space" if roomy else "full", detail)
