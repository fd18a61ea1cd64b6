"""What fetching takes by where pages lie, and what computing takes by how many tokens and how far into the prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from p2pkv.recompute.estimate import Estimate

_FAILED = 2.0
"""A fetch that failed after some time would have taken longer, nobody knows how much: so many times as long."""
_FORGOTTEN = 2
"""In twice so many decisions the fear of a first failure halves; a guess."""
_GROWTH = 4
"""After a failure so many times what has come since is believed to come too; a guess."""
_STIFFNESS = (1e-2, 1e-4)
"""Of a fetch's fixed part, and of bytes: samples of one size are put down to bytes."""
_MOST_SOURCES = 4096
"""Beyond it those are forgotten of whom nothing was heard for longest; a guess."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where pages lie, as far as it says how fast they come."""

    owner: int
    """The node's key; 0 for this node itself."""
    is_on_disk: bool = False
    transport: str = ""
    """What leads there; empty if that is not known."""


@dataclass(slots=True)
class _Measured:
    estimate: Estimate = field(default_factory=lambda: Estimate(_STIFFNESS))
    heard_at: int = 0
    failed_s: float = 0.0
    """What a fetch that failed is taken for, until as much has come; 0: none has since."""
    failed_bytes: int = 0
    proven_bytes: int = 0
    """The most that came at once since then."""
    failed_at: int = 0
    n_failures: int = 0
    """In a row."""

    def seconds(self, nbytes: NDArray[np.int64], now: int) -> NDArray[np.float64]:
        """Return what so many bytes take: what is much more than has come since a failure may fail again.

        The fear of it halves with time, and more slowly after each failure in a row.
        """
        age = (now - self.failed_at) / (_FORGOTTEN * 2.0**self.n_failures)
        failed_s = self.failed_s * 0.5**age
        expected = np.full(len(nbytes), failed_s)
        if self.estimate.is_known:
            expected = self.estimate.seconds(_byte_features(nbytes))
        is_doubtful = nbytes > _GROWTH * self.proven_bytes
        return np.where(is_doubtful, np.maximum(expected, failed_s), expected)

    def failed(self, nbytes: int, seconds: float, now: int) -> None:
        """Learn that so many bytes did not come in that time."""
        self.failed_at, self.n_failures = now, min(self.n_failures + 1, 16)
        self.failed_s = max(self.failed_s, _FAILED * seconds)
        self.failed_bytes, self.proven_bytes = max(self.failed_bytes, nbytes), 0
        self.estimate.doubt()

    def came(self, nbytes: int, seconds: float) -> None:
        """Learn that so many bytes took so long."""
        self.estimate.add(_byte_features(np.array([nbytes]))[0], seconds)
        self.proven_bytes = max(self.proven_bytes, nbytes)
        if _GROWTH * self.proven_bytes >= self.failed_bytes:
            self.failed_s, self.failed_bytes, self.n_failures = 0.0, 0, 0


class FetchRates:
    """Seconds by bytes and source. Who was not measured yet is taken for one of his kind. Not thread-safe."""

    def __init__(self) -> None:
        self._sources: dict[Source, _Measured] = {}
        self._kinds: dict[tuple[bool, str] | bool, Estimate] = {}
        self._n_decisions = 0

    def tick(self) -> None:
        """Count a decision: what nothing is heard of grows older by it."""
        self._n_decisions += 1

    def knows(self, source: Source) -> bool:
        """Whether anything is known of it or its kind."""
        return source in self._sources or self._alike(source) is not None

    def age(self, source: Source) -> int:
        """Return how many decisions ago the last sample of this very source came; without one, how many there were."""
        found = self._sources.get(source)
        return self._n_decisions - (found.heard_at if found is not None else 0)

    def seconds(self, source: Source, nbytes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return what each of so many bytes take in one fetch; nothing takes no time. The source must be known."""
        measured = self._sources.get(source)
        if measured is not None:
            return np.where(nbytes > 0, measured.seconds(nbytes, self._n_decisions), 0.0)
        alike = self._alike(source)
        assert alike is not None
        return np.where(nbytes > 0, alike.seconds(_byte_features(nbytes)), 0.0)

    def add(self, source: Source, nbytes: int, seconds: float, *, has_failed: bool) -> None:
        """Learn how long a fetch took; one that failed is believed at once."""
        measured = self._sources.pop(source, None)
        if measured is None:
            measured = _Measured()
        self._sources[source] = measured  # the last in order is the last one heard of
        while len(self._sources) > _MOST_SOURCES:
            del self._sources[next(iter(self._sources))]
        measured.heard_at = self._n_decisions
        if has_failed:
            measured.failed(nbytes, seconds, self._n_decisions)
            return  # says nothing of others of its kind
        measured.came(nbytes, seconds)
        for kind in _kinds(source):
            alike = self._kinds.setdefault(kind, Estimate(_STIFFNESS))
            alike.add(_byte_features(np.array([nbytes]))[0], seconds)

    def _alike(self, source: Source) -> Estimate | None:
        return next((self._kinds[kind] for kind in _kinds(source) if kind in self._kinds), None)


def _kinds(source: Source) -> tuple[tuple[bool, str] | bool, ...]:
    """Return whom it resembles, the most alike first; what is on disk never resembles what is in memory."""
    return (source.is_on_disk, source.transport), source.is_on_disk


def _byte_features(nbytes: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.stack([np.ones(len(nbytes)), nbytes.astype(np.float64)], axis=1)


class PrefillRate:
    """Seconds by tokens, and by how many tokens come before them. Not thread-safe."""

    def __init__(self, tokens_per_second: float = 0.0) -> None:
        """Expect this many a second until there is a sample; 0: nothing is known."""
        # a step's fixed part, tokens, and what each looks back at: attention's part grows with the position
        self._estimate = Estimate((1e-2, 1e-4, 1e-2))
        self._given = tokens_per_second
        self.n_samples = 0

    @property
    def is_known(self) -> bool:
        """Whether anything is known."""
        return self._estimate.is_known or self._given > 0

    def seconds(self, first: NDArray[np.int64], n_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return what computing so many tokens after the first so many takes; must be known."""
        if not self._estimate.is_known:
            return n_tokens / self._given
        expected = self._estimate.seconds(_token_features(first, n_tokens))
        return np.where(n_tokens > 0, expected, 0.0)

    def add(self, first: int, n_tokens: int, seconds: float) -> None:
        """Learn how long it took to compute ``n_tokens`` after the first ``first``."""
        self.n_samples += 1
        self._estimate.add(_token_features(np.array([first]), np.array([n_tokens]))[0], seconds)


def _token_features(first: NDArray[np.int64], n_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    n = n_tokens.astype(np.float64)
    return np.stack([np.ones(len(n)), n, n * (first + n / 2)], axis=1)
