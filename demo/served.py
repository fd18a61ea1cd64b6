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
class Answered:
    """A request's output, beside that of one process alone."""

    request: Request
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

    def _differences(self, who: str) -> list[str]:
        """Say in what the output of ``who`` differs, and that it reused too little; one sentence each."""
        name, problems = self.request.name, []
        if not self.has_same_tokens:
            pairs = zip(self.generated.result.tokens, self.alone.tokens, strict=True)
            first = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
            problems.append(f"{name}: output differs from that of one process alone, from token {first} on")
        if not self.has_same_kv:
            problems.append(f"{name}: KV differs from that of one process alone")
        return problems + self._too_little(
            who, self.generated.result.n_reused, (len(self.request.prompt) - 1) // PAGE * PAGE
        )

    def _too_little(self, who: str, n_reused: int, n_expected: int) -> list[str]:
        if n_reused >= n_expected:
            return []
        return [f"{self.request.name}: {who} reused {n_reused} tokens of {n_expected} that were published"]


@dataclass(frozen=True, slots=True)
class Served(Answered):
    """A request, prefilled on one node and generated on another, and once more on the latter alone."""

    prefill_node: str
    decode_node: str
    prefill_seconds: float
    """From sending the prompt to the prefill node to its answer."""
    prefilled: messages.PrefillDone

    def problems(self) -> list[str]:
        """Say what went wrong, one sentence each."""
        n_reused = self.prefilled.result.n_reused
        return [
            *self._differences(self.decode_node),
            *self._too_little(self.prefill_node, n_reused, self.request.n_known),
        ]


@dataclass(frozen=True, slots=True)
class Survived(Answered):
    """A request answered by the successor of an engine that was killed, with the pages that one had computed."""

    engine_name: str
    host_node: str
    """It held the pages meanwhile."""

    def problems(self) -> list[str]:
        """Say what went wrong, one sentence each."""
        problems = self._differences(f"the successor of {self.engine_name}")
        elsewhere = {way.source for way in self.generated.traffic} - {self.host_node, messages.OWN_HOST}
        if elsewhere:
            problems.append(f"{self.request.name}: pages came from {', '.join(sorted(elsewhere))}")
        return problems
