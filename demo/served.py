"""One prompt and how it was served: what the demo shows, and checks."""

from __future__ import annotations

from dataclasses import dataclass

from demo import engine, messages
from demo.model import PAGE, Tokens


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to serve."""

    name: str
    prompt: Tokens
    n_known: int
    """Tokens at its beginning whose pages some node has published before."""


@dataclass(frozen=True, slots=True)
class Served:
    """A request, prefilled on one node and generated on another, and once more on the latter alone."""

    request: Request
    prefill_node: str
    decode_node: str
    prefill_seconds: float
    """From sending the prompt to the prefill node to its answer."""
    prefilled: messages.PrefillDone
    generated: messages.GenerateDone
    alone: engine.Generated

    @property
    def has_same_tokens(self) -> bool:
        """The output with p2pkv is that of one process alone, token for token."""
        return self.generated.result.tokens == self.alone.tokens

    @property
    def has_same_kv(self) -> bool:
        """The prompt's pages hold what one process alone computes, bit for bit."""
        return self.generated.result.kv_digest == self.alone.kv_digest

    def problems(self) -> list[str]:
        """Say what went wrong, one sentence each."""
        name, problems = self.request.name, []
        if not self.has_same_tokens:
            pairs = zip(self.generated.result.tokens, self.alone.tokens, strict=True)
            first = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
            problems.append(f"{name}: output differs from that of one process alone, from token {first} on")
        if not self.has_same_kv:
            problems.append(f"{name}: KV differs from that of one process alone")
        for node, n_reused, n_expected in (
            (self.prefill_node, self.prefilled.result.n_reused, self.request.n_known),
            (self.decode_node, self.generated.result.n_reused, (len(self.request.prompt) - 1) // PAGE * PAGE),
        ):
            if n_reused < n_expected:
                problems.append(
                    f"{name}: {node} reused {n_reused} tokens of {n_expected} that were published"
                )
        return problems
