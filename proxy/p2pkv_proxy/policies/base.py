"""What a policy is."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.tracked import Tracked


@dataclass(frozen=True, slots=True)
class Choice:
    """An instance, and why: one of a few words for the metrics, and a sentence for whoever asks."""

    tracked: Tracked
    reason: str
    detail: str = ""


class Policy(ABC):
    """Chooses for one side, prefill or decode. Called by one thread; never waits."""

    wants_holdings: ClassVar[bool] = False
    """Whether the directory should be asked for ``prompt.holdings`` first."""

    @abstractmethod
    def choose(self, prompt: Prompt, candidates: Sequence[Tracked]) -> Choice:
        """Pick one of ``candidates``, of which there is at least one, ordered by id."""

    def forget(self, instance_id: str) -> None:  # noqa: B027 - most have nothing to forget
        """Drop what was remembered of an instance that is gone."""


def burden(tracked: Tracked, now: float) -> float:
    """Return an instance's tokens in flight, and those that its failures of late count as.

    Who fails at once would else always have the fewest, and keep every prompt that was sent there before.
    """
    return tracked.weight + tracked.penalty(now)


def lightest(candidates: Sequence[Tracked]) -> Tracked:
    """Return the one with the least burden, then the fewest requests, then the fewest ever."""
    now = time.monotonic()
    return min(candidates, key=lambda tracked: (burden(tracked, now), tracked.busy, tracked.sent))
