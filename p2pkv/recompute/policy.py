"""How many of the pages of a prompt that others have are fetched; the rest is computed.

What each number of pages would take is known from what fetches and computations have taken of late; the least is
chosen. What is not done is not measured either, so that now and then a little is done that seems worse: that costs a
bounded part of all time (:data:`_PROBE_SHARE`), by what is known. Each decision hears in the end what it really took,
and counts what the two simple policies would have taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from p2pkv.metrics import Metrics
from p2pkv.recompute.hits import Hits
from p2pkv.recompute.rates import FetchRates, PrefillRate

_MARGIN = 0.03
"""By how much computing has to be quicker: it keeps the engine from other requests, which fetching does not."""
_PROBE_SHARE = 0.02
"""How much of all time may go into finding out whether what is not done has become better."""
_SAVED_UP = 4.0
"""For how many mean requests' time probes may save up. A guess."""
_STALE = 4
"""After so many decisions without a sample a source is worth a probe. A guess."""
_LIMIT = 1.5
"""A fetch is given up after so many times what computing its pages would take: a surprise costs no more than that."""
_LEAST_LIMIT_S = 0.005
"""So long a fetch may always take; a guess."""
_REACH_KEPT, _REACH = 0.9, 8
"""What was computed in one go says how long up to eight times as much takes, and a little less with each decision."""


class Choice(Enum):
    """What is done about the pages that others have."""

    FETCH_ALL = "fetch_all"
    FETCH_PART = "fetch_part"
    RECOMPUTE = "recompute"


class Reason(Enum):
    """Why."""

    SETTING = "setting"
    """The policy is ``always`` or ``never``."""
    UNMEASURED = "unmeasured"
    """It is not known yet what one of the two takes: all is fetched."""
    QUICKER = "quicker"
    """Nothing takes less."""
    WAITS = "waits"
    """Nothing takes less, although most of the time is waiting for what is being fetched already."""
    PROBE = "probe"
    """Something else takes less, as far as is known; this is to find out."""


@dataclass(slots=True, eq=False)
class Decision:
    """How many pages are fetched, and what that is expected to take."""

    hits: Hits
    n_pages: int
    choice: Choice
    reason: Reason
    fetch_s: dict[int, float]
    """By owner, without what it waits for; empty if that is not known."""
    wait_s: float
    """What the fetch is expected to wait for others."""
    seconds: float
    """Until all tokens of the prompt are there; 0 if that is not known."""
    limit_s: float | None = None
    """After which the fetch is to be given up, and what has not come counts as failed; None: not by this."""
    is_open: bool = True
    """Whether nothing was said yet of how its fetch ended."""


class Policy:
    """Thread-safe. ``kind`` is ``always`` (fetch what can be fetched), ``never`` or ``measured``."""

    def __init__(
        self,
        kind: str,
        metrics: Metrics,
        *,
        tokens_per_second: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Expect the engine to compute so many tokens a second until it was measured; 0: not known."""
        self._kind, self._metrics, self._clock = kind, metrics, clock
        self._lock = threading.Lock()  # guards all below
        self._rates, self._prefill = FetchRates(), PrefillRate(tokens_per_second)
        self._busy_until: dict[int, float] = {}
        self._n_open: dict[int, int] = {}
        self._allowance = 0.0  # seconds that probes may cost
        self._mean_s = 0.0
        self._reach = 0.0  # tokens; see _REACH

    def decide(self, hits: Hits, *, queued_s: float = 0.0) -> Decision:
        """Say how many of the pages to fetch.

        ``queued_s``: how long the engine computes for others before its turn; a fetch goes on meanwhile.
        Whoever fetches says so by :meth:`fetched`; :meth:`settled` ends it.
        """
        with self._lock:
            decision = self._decide(hits, queued_s)
            self._open(decision)
        self._metrics.recompute_decisions.labels(decision.choice.value, decision.reason.value).inc()
        self._metrics.count(self._metrics.recompute_pages, "fetched", decision.n_pages)
        self._metrics.count(self._metrics.recompute_pages, "recomputed", len(hits) - decision.n_pages)
        return decision

    def fetched(self, decision: Decision, seconds: float, failed: NDArray[np.bool_] | None = None) -> None:
        """Learn that the fetch of a decision has ended after so long; ``failed``: ``(n_pages,)``, which did not come.

        Once a decision; those that fetch nothing need not be told of.
        """
        with self._lock:
            self._close(decision)
            self._learn_fetch(decision, seconds, failed)

    def computed(self, first: int, n_tokens: int, seconds: float) -> None:
        """Learn that the engine took so long to compute ``n_tokens`` after the first ``first`` of a prompt."""
        if n_tokens < 1 or seconds <= 0:
            return
        with self._lock:
            self._prefill.add(first, n_tokens, seconds)
            self._reach = max(self._reach, float(n_tokens))

    def settled(self, decision: Decision, seconds: float) -> None:
        """Learn that all tokens of the prompt were there after so long: what came of the decision is counted."""
        with self._lock:
            self._close(decision)
            if decision.reason is Reason.PROBE:
                self._allowance -= max(0.0, seconds - decision.seconds)
            if not self._is_known(decision.hits):
                return
            costs, _ = self._costs(decision.hits, 0.0, is_alone=True)
        always, never = float(costs[-1]), float(costs[0])
        if decision.n_pages == len(decision.hits):
            always = seconds
        elif decision.n_pages == 0:
            never = seconds
        count = self._metrics.recompute_seconds
        for name, value in (
            ("predicted", decision.seconds),
            ("real", seconds),
            ("always", always),
            ("never", never),
            ("regret", max(0.0, seconds - min(always, never))),
        ):
            count.labels(name).inc(value)

    def dropped(self, decision: Decision) -> None:
        """Forget a decision that came to nothing: its request has ended, or nothing was fetched after all."""
        with self._lock:
            self._close(decision)

    # --- with the lock held

    def _is_known(self, hits: Hits) -> bool:
        return self._prefill.is_known and all(map(self._rates.knows, hits.used()))

    def _decide(self, hits: Hits, queued_s: float) -> Decision:
        n = len(hits)
        is_known = self._is_known(hits)
        self._rates.tick()
        self._reach *= _REACH_KEPT
        chosen = 0 if self._kind == "never" else n
        reason = Reason.UNMEASURED if self._kind == "measured" else Reason.SETTING
        if not is_known:
            return Decision(hits, chosen, _choice(chosen, n), reason, {}, 0.0, 0.0)
        costs, by_owner = self._costs(hits, queued_s)
        if self._kind == "measured":
            chosen, reason = self._best(hits, costs)
        own = {owner: float(seconds[chosen]) for owner, seconds in by_owner.items() if seconds[chosen] > 0}
        waits = {owner: self._ahead(owner) for owner in own}
        total = max((waits[owner] + own[owner] for owner in own), default=0.0)
        wait = max(0.0, total - max(own.values(), default=0.0))
        if reason is Reason.QUICKER and wait > total / 2:
            reason = Reason.WAITS
        decision = Decision(hits, chosen, _choice(chosen, n), reason, own, wait, float(costs[chosen]))
        if self._kind == "measured":
            decision.limit_s = self._limit(hits, chosen, max(wait, queued_s))
        return decision

    def _limit(self, hits: Hits, chosen: int, wait_s: float) -> float:
        first = hits.first_token + np.array([0, chosen * hits.page_tokens])
        whole_s, rest_s = map(float, self._prefill.seconds(first, hits.n_tokens - first))
        return wait_s + max(_LEAST_LIMIT_S, _LIMIT * (whole_s - rest_s))

    def _best(self, hits: Hits, costs: NDArray[np.float64]) -> tuple[int, Reason]:
        """Return the number of pages that takes the least; or one that takes a little more, to find out."""
        n = len(hits)
        # the greatest of those that are alike: what is computed costs others' time
        best = int(np.flatnonzero(costs <= costs.min() * (1 + _MARGIN))[-1])
        self._mean_s += (float(costs[best]) - self._mean_s) / 32
        saved = self._allowance + _PROBE_SHARE * float(costs[best])
        self._allowance = min(saved, _SAVED_UP * self._mean_s)
        affordable = costs - costs[best] <= max(0.0, self._allowance)
        probe = best
        if best < n and any(
            self._rates.age(hits.sources[i]) > _STALE for i in set(hits.of_page[best:].tolist())
        ):
            probe = int(np.flatnonzero(affordable)[-1])
        elif best > 0 and self._reach * _REACH < hits.n_tokens - hits.first_token:
            probe = int(np.flatnonzero(affordable)[0])
        if probe == best:
            return best, Reason.QUICKER
        self._allowance -= max(0.0, float(costs[probe] - costs[best]))
        return probe, Reason.PROBE

    def _costs(
        self, hits: Hits, queued_s: float, *, is_alone: bool = False
    ) -> tuple[NDArray[np.float64], dict[int, NDArray[np.float64]]]:
        """Return ``(n + 1,)`` seconds for the first 0, 1, ... pages fetched, and what fetching takes by owner.

        Owners are read from at once, and of one owner its disk before its memory.
        """
        by_owner: dict[int, NDArray[np.float64]] = {}
        for number, source in enumerate(hits.sources):
            nbytes = hits.bytes_of(number)
            if not nbytes[-1]:
                continue
            seconds = self._rates.seconds(source, nbytes)
            by_owner[source.owner] = by_owner.get(source.owner, np.zeros(1)) + seconds
        fetching = np.full(len(hits) + 1, queued_s)
        for owner, seconds in by_owner.items():
            ahead = 0.0 if is_alone else self._ahead(owner)
            fetching = np.maximum(fetching, np.where(seconds > 0, ahead + seconds, 0.0))
        first = hits.first_token + np.arange(len(hits) + 1) * hits.page_tokens
        return fetching + self._prefill.seconds(first, hits.n_tokens - first), by_owner

    def _ahead(self, owner: int) -> float:
        """Return how long an owner is expected to send what others have asked for already."""
        return max(0.0, self._busy_until.get(owner, 0.0) - self._clock())

    def _open(self, decision: Decision) -> None:
        for owner, seconds in decision.fetch_s.items():
            self._busy_until[owner] = self._clock() + self._ahead(owner) + seconds
            self._n_open[owner] = self._n_open.get(owner, 0) + 1

    def _close(self, decision: Decision) -> None:
        if not decision.is_open:
            return
        decision.is_open = False
        for owner in decision.fetch_s:
            self._n_open[owner] -= 1
            if not self._n_open[owner]:  # whatever was expected, nothing is under way
                del self._n_open[owner], self._busy_until[owner]

    def _learn_fetch(self, decision: Decision, seconds: float, failed: NDArray[np.bool_] | None) -> None:
        """Put the time down to who had the most to send; of the others it says only that they did not take longer."""
        hits, n = decision.hits, decision.n_pages
        of_page, own = hits.of_page[:n], decision.fetch_s
        taken = max(0.0, seconds - decision.wait_s)
        slowest = max(own, key=own.__getitem__) if own else None
        for number, source in enumerate(hits.sources):
            of_it = of_page == number
            nbytes = int(hits.nbytes[:n][of_it].sum())
            if not nbytes:
                continue
            has_failed = failed is not None and bool(failed[of_it].all())
            of_owner = own.get(source.owner, 0.0)
            if not own or has_failed:
                share = seconds
            elif source.owner != slowest and taken >= of_owner:
                continue
            else:  # an owner's tiers are off by the same
                expected = float(self._rates.seconds(source, np.array([nbytes]))[0])
                share = taken * expected / of_owner
            self._rates.add(source, nbytes, share, has_failed=has_failed)


def _choice(n_fetched: int, n_pages: int) -> Choice:
    if n_fetched == 0:
        return Choice.RECOMPUTE
    return Choice.FETCH_ALL if n_fetched == n_pages else Choice.FETCH_PART
