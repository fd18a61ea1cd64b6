"""What a serving benchmark's answers come to: percentiles, rates, and how many kept what was promised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from p2pkv_bench.serving.client import Answer

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Promise:
    """What counts as good service, in seconds."""

    first_token: float
    per_token: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One target's answers. Times in seconds, by percentile."""

    target: str
    n_requests: int
    n_errors: int
    seconds: float
    first_token: dict[int, float]
    """TTFT: from when a request was due to its first token."""
    between_tokens: dict[int, float]
    """ITL: every gap between two tokens of an answer."""
    per_token: dict[int, float]
    """TPOT: of an answer, the time behind its first token divided by its other tokens."""
    whole: dict[int, float]
    """E2E."""
    goodput: float
    """Requests a second that kept the promise."""
    tokens_per_second: float
    late: float
    """p99 of how late the benchmark itself was."""
    pages: dict[str, float]
    """Pages of the prompts by where they came from, as the named p2pkv nodes count them; ``computed`` for new ones."""
    overhead: dict[str, float]
    """The router's own part of the time to the first token, if it is one: mean, and p99 at most."""

    @property
    def hit_rate(self) -> float | None:
        """Share of the pages that were there already."""
        total = sum(self.pages.values())
        return 1 - self.pages.get("computed", 0.0) / total if total else None

    def as_dict(self) -> dict[str, object]:
        """Return everything as JSON takes it."""
        return asdict(self) | {"hit_rate": self.hit_rate}


def figures(
    target: str,
    answers: Sequence[Answer],
    seconds: float,
    promise: Promise,
    pages: dict[str, float],
    overhead: dict[str, float],
) -> Figures:
    """Add up."""
    good = [answer for answer in answers if not answer.error]
    per_token = [(a.last - a.first) / (a.n_tokens - 1) if a.n_tokens > 1 else 0.0 for a in good]
    n_kept = sum(
        answer.first <= promise.first_token and each <= promise.per_token
        for answer, each in zip(good, per_token, strict=True)
    )
    return Figures(
        target=target,
        n_requests=len(answers),
        n_errors=len(answers) - len(good),
        seconds=seconds,
        first_token=_percentiles(answer.first for answer in good),
        between_tokens=_percentiles(gap for answer in good for gap in answer.gaps),
        per_token=_percentiles(per_token),
        whole=_percentiles(answer.last for answer in good),
        goodput=n_kept / seconds if seconds else 0.0,
        tokens_per_second=sum(answer.n_tokens for answer in good) / seconds if seconds else 0.0,
        late=_percentiles(answer.late for answer in answers)[99],
        pages=pages,
        overhead=overhead,
    )


def _percentiles(values: Iterable[float]) -> dict[int, float]:
    found = np.fromiter(values, float)
    if not len(found):
        return dict.fromkeys(PERCENTILES, float("nan"))
    return {p: float(np.percentile(found, p)) for p in PERCENTILES}
